"""The package as a whole: what importing costs, what is public, and which way the imports point."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxspec

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxspec", "pallas_kernels", "checkpoints")

# Room -> the rooms that it may import from, itself aside. A room is a package of jaxspec, or one of its files.
PLAIN = {"jaxspec.config", "jaxspec.sampling_params", "jaxspec.outputs", "jaxspec.options", "jaxspec.shapes"}
BASE = PLAIN | {"jaxspec.parallel"}
BELOW_DRAFTERS = BASE | {"jaxspec.models", "jaxspec.sampling", "jaxspec.cache", "pallas_kernels"}
BELOW_ENGINE = BELOW_DRAFTERS | {"jaxspec.decode", "jaxspec.drafters", "jaxspec.verify"}
LOADING = {"jaxspec.loading", "checkpoints"}
BELOW_LLM = BELOW_ENGINE | {
    "jaxspec.engine",
    "jaxspec.detokenizer",
    "jaxspec.progress",
    "jaxspec.prompts",
    "jaxspec.job",
}
BELOW_CLI = BELOW_LLM | LOADING | {"jaxspec.llm"}
ALLOWED: dict[str, set[str]] = {
    "pallas_kernels": set(),
    "checkpoints": {"jaxspec.models.config", "jaxspec.models.limits"},
    "jaxspec": set(),  # __init__: public names are strings, loaded on first use
    "jaxspec.options": set(),
    "jaxspec.shapes": set(),
    "jaxspec.outputs": set(),
    "jaxspec.parallel": {"jaxspec.shapes"},
    "jaxspec.detokenizer": set(),
    "jaxspec.progress": set(),
    "jaxspec.config": {"jaxspec.options"},
    "jaxspec.sampling_params": {"jaxspec.options"},
    "jaxspec.cache": BASE | {"jaxspec.models.config", "pallas_kernels"},  # the config is data, not the decoder
    "jaxspec.sampling": BASE | {"jaxspec.cache", "pallas_kernels"},
    "jaxspec.models": BASE | {"jaxspec.cache", "pallas_kernels"},
    "jaxspec.verify": BELOW_DRAFTERS | {"jaxspec.drafters.base"},  # a Proposal is what it verifies
    "jaxspec.drafters": BELOW_DRAFTERS,
    "jaxspec.decode": BELOW_DRAFTERS | {"jaxspec.drafters", "jaxspec.verify"},
    "jaxspec.engine": BELOW_ENGINE,
    "jaxspec.prompts": {"jaxspec.options", "jaxspec.sampling_params"},
    "jaxspec.job": PLAIN | {"jaxspec.engine", "jaxspec.detokenizer", "jaxspec.prompts"},
    "jaxspec.loading": {"checkpoints", "pallas_kernels", "jaxspec.engine.setup", "jaxspec.models"},
    "jaxspec.llm": BELOW_LLM | LOADING,
    "jaxspec.async_llm": BELOW_LLM | {"jaxspec.llm"},
    "jaxspec.prometheus": PLAIN | {"jaxspec.engine", "jaxspec.llm", "jaxspec.async_llm"},
    "jaxspec.train": BELOW_CLI | {"jaxspec.demo"},
    "jaxspec.info": {"jaxspec.cache", "jaxspec.config", "jaxspec.models", "jaxspec.parallel", "pallas_kernels"}
    | LOADING,
    "jaxspec.demo": BELOW_CLI,
    "jaxspec.bench": BELOW_LLM | LOADING | {"jaxspec.demo"},
    "jaxspec.cli": BELOW_CLI | {"jaxspec.info", "jaxspec.demo", "jaxspec.bench", "jaxspec.train"},
}


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())


def room(module: str) -> str:
    parts = module.split(".")
    return parts[0] if parts[0] != "jaxspec" else ".".join(parts[:2])


def imported(path: Path) -> Iterator[str]:
    """Our own modules that a file imports anywhere in it, by full name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            assert node.module is not None
            # `from jaxspec import info` names a module, `from jaxspec.llm import LLM` an object in one.
            named = [f"{node.module}.{a.name}" for a in node.names]
            names = [name if name in MODULES else node.module for name in named]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in PACKAGES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    here = room(module)
    allowed = ALLOWED[here] | {here}
    for name in imported(MODULES[module]):
        fits = any(name == a or name.startswith(a + ".") for a in allowed)
        assert fits, f"{module} imports {name}; {here} may import from {', '.join(sorted(allowed))}"


def test_no_circles():
    """Not even by an import in a function, or for types only."""
    graph = {module: set(imported(path)) for module, path in MODULES.items()}
    assert not circle(graph), " -> ".join(circle(graph))
    graph["jaxspec.options"].add("jaxspec.config")
    assert set(circle(graph)) == {"jaxspec.options", "jaxspec.config"}, "the test sees none any more"


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as found:
        return found.args[1]
    return []


def test_kernels_stand_alone():
    """pallas_kernels is of use without jaxspec: it imports jax, numpy and the standard library only."""
    outside = set()
    for module, path in MODULES.items():
        if not module.startswith("pallas_kernels"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            outside |= {name.split(".")[0] for name in names}
    assert outside - set(sys.stdlib_module_names) <= {"jax", "jaxlib", "jaxtyping", "numpy", "pallas_kernels"}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("first", [*PACKAGES, "jaxspec.llm", "jaxspec.cli", "jaxspec.decode.round"])
def test_any_module_may_be_imported_first(first):
    run(f"import {first}; import checkpoints; from jaxspec import LLM")


def test_import_is_light():
    """jax and the engine are loaded when they are needed, so that `jaxspec --help` answers at once."""
    heavy = ["jax", "jaxlib", "flax", "numpy", "transformers", "matplotlib", "huggingface_hub"]
    heavy += ["jaxspec.engine", "jaxspec.llm", "jaxspec.loading", "checkpoints"]
    code = f"import sys, jaxspec, jaxspec.cli; print(sorted(set({heavy!r}) & set(sys.modules)))"
    assert run(code).strip() == "[]"


def test_public_names():
    assert set(jaxspec.__all__) >= {"LLM", "SamplingParams", "SpeculativeConfig", "generate", "__version__"}
    assert set(jaxspec.__all__) >= {"RequestOutput", "CompletionOutput", "SpecDecodeMetrics"}
    assert len(jaxspec.__all__) <= 10
    for name in jaxspec.__all__:
        assert getattr(jaxspec, name) is not None
        assert name in dir(jaxspec)
    with pytest.raises(AttributeError, match="no attribute 'LLm'; public names: LLM, AsyncLLM"):
        jaxspec.LLm  # noqa: B018
    import checkpoints

    assert set(checkpoints.__all__) >= {"resolve", "load_config", "load_params", "load_tokenizer", "load_stop_ids"}


def test_nothing_is_looked_for_in_the_repository():
    """What is installed is the packages: no file of theirs names one beside them, such as a test's."""
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith(("tests/", "colab/", "docs/")), f"{module}: {node.value}"


def test_init_files_only_reexport():
    """Of jaxspec's rooms: nothing to look for in an __init__."""
    for path in (ROOT / "jaxspec").glob("*/__init__.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        statements = tree.body[ast.get_docstring(tree) is not None :]
        assert all(isinstance(statement, ast.ImportFrom) for statement in statements), path
