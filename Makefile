# make demo        real weights, plain and speculative side by side
# make test        every kind of test, in minutes
# make test-all    every test
# make test-rest   what make test leaves out
# make nvidia      NVIDIA's compilers, which need no GPU, for the tests that compile for some (docs/testing.md)
# make lint        ruff and mypy
# make docs        the documents as a site, in site/, warnings as errors
# Each makes or reuses .venv with this machine's python3 and installs what it needs. Extra arguments: ARGS="...".

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
ARGS ?=

# Without cached bytecode every process that tests start compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-rest nvidia lint docs clean

demo: $(VENV)/.demo
	$(BIN)/jaxspec demo $(ARGS)

# More than eight workers cost more memory and start-up than they save. Each begins with a part of the files in their
# order, so that what the tests of a file share is mostly compiled by one; in the end it holds some 7 GB. A test that
# does not end ends its worker, which prints where it was, and fails; the others go on.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal \
  -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

test: $(VENV)/.test
	$(PYTEST) -m "not thorough" $(ARGS)

test-all: $(VENV)/.test
	$(PYTEST) $(ARGS)

test-rest: $(VENV)/.test
	$(PYTEST) -m "thorough and not exhaustive" $(ARGS)

# In a folder of their own, and of exactly jaxlib's version.
nvidia: $(VENV)/.test
	version=$$($(BIN)/python -c "import jaxlib; print(jaxlib.__version__)") && $(PIP) --upgrade --no-deps \
	  --target .nvidia jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version nvidia-cuda-nvcc-cu12

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Without --quiet, which keeps MkDocs from counting the warnings. The variable silences an advertisement.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

clean:
	rm -rf $(VENV) .nvidia site .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Stamps: installed once, and again when pyproject.toml changes. The message goes to standard error because
# `make -s demo ARGS=--json` prints a document.
$(VENV)/.demo: EXTRAS := [plots]
$(VENV)/.test: EXTRAS := [test]
$(VENV)/.lint: EXTRAS := [lint]
$(VENV)/.docs: EXTRAS := [docs]
$(VENV)/.demo $(VENV)/.test $(VENV)/.lint $(VENV)/.docs: pyproject.toml | $(BIN)/python
	@echo "installing jaxspec$(EXTRAS) into $(VENV), some minutes the first time ..." >&2
	$(PIP) --editable '.$(EXTRAS)' >&2
	@touch $@
