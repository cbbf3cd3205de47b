"""One model that drafts for itself, served by one LLM, which every test leaves idle."""

from __future__ import annotations

import pytest

from jaxspec import LLM
from tests.api.llm.answers import assert_idle, one_shape
from tests.support.model_folders import write_model


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="package")
def llm(folder):
    """The target drafts for itself: nearly every round accepts all K drafts, so stops fall into accepted runs."""
    speculative = {"model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
    options = {"max_num_seqs": 4, "num_pages": 64, "rounds_per_launch": 4}
    return one_shape(LLM(str(folder), speculative_config=speculative, **options))


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """After each test that uses it, the shared engine is idle and holds no page."""
    yield
    if "llm" in request.fixturenames:
        assert_idle(request.getfixturevalue("llm"))
