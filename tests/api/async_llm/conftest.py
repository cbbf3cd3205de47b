"""One AsyncLLM, which every test leaves idle, and an LLM that says what to expect of it."""

from __future__ import annotations

import pytest

from jaxspec import LLM, AsyncLLM
from tests.api.async_llm.calls import GREEDY, OPTIONS, assert_idle
from tests.api.llm.answers import one_shape
from tests.support.model_folders import write_model


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="package")
def expected(folder):
    """The greedy answers, and a function for others."""
    llm = one_shape(LLM(folder, **OPTIONS))
    return lambda prompts, params=GREEDY: llm.generate(prompts, params)


@pytest.fixture(scope="package")
def shared(folder):
    llm = AsyncLLM(folder, **OPTIONS)
    one_shape(llm.llm)
    yield llm
    llm.shutdown()


@pytest.fixture
def llm(shared):
    """After each test the engine is idle and holds no page."""
    yield shared
    assert_idle(shared)


@pytest.fixture
def own(folder):
    """For tests that end it."""
    llm = AsyncLLM(folder, **OPTIONS)
    yield llm
    llm.shutdown()
