"""One tiny target, and the LLM that generates training data with it."""

from __future__ import annotations

import pytest

from jaxspec.llm import LLM
from jaxspec.train.data_options import DataOptions
from jaxspec.train.writer import engine_options
from tests.model_folders import write_model

MIXTURE = {"chat": 2.0, "free": 1.0, "list": 0.0}
OPTIONS = {"tokens": 6000, "length": 128, "shard_size": 24, "rows": 8, "mixture": MIXTURE, "seed": 5}


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="package")
def llm(folder):
    return LLM(folder, **engine_options(DataOptions(**OPTIONS)))
