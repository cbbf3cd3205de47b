"""One AsyncLLM and one server of it; after each test nobody is inside, the engine is idle and holds no page."""

from __future__ import annotations

import contextlib

import pytest

from jaxspec import LLM, AsyncLLM
from tests.api.async_llm.calls import OPTIONS
from tests.api.llm.answers import one_shape
from tests.server.running import Running
from tests.support.model_folders import write_model


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="package")
def expected(folder):
    """An LLM that says what to expect."""
    return one_shape(LLM(folder, **OPTIONS))


@pytest.fixture(scope="package")
def llm(folder):
    llm = AsyncLLM(folder, **OPTIONS)
    one_shape(llm.llm)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="package")
def shared(llm):
    running = Running(llm)
    yield running
    running.stop()


@pytest.fixture
def server(shared):
    yield shared
    shared.assert_idle()


@pytest.fixture
def another(llm):
    """Makes servers of the same AsyncLLM with options of their own."""
    with contextlib.ExitStack() as stack:

        def make(**options):
            running = Running(llm, **options)
            stack.callback(running.stop)
            stack.callback(running.assert_idle)
            return running

        yield make
