"""One tiny target, and the LLM that generates training data with it; another with its data, and heads for it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
from jaxspec.api.llm import LLM
from jaxspec.models.model import Model
from jaxspec.parallel.placement import make_placement
from jaxspec.train.data_options import DataOptions
from jaxspec.train.methods import implementation
from jaxspec.train.writer import engine_options
from tests.support.loaded import load
from tests.support.model_folders import write_model
from tests.train import runs
from tests.train.heads import LAYERS, SHAPES, options

MIXTURE = {"chat": 2.0, "free": 1.0, "list": 0.0}
OPTIONS = {"tokens": 6000, "length": 128, "shard_size": 24, "rows": 8, "mixture": MIXTURE, "seed": 5}


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="package")
def llm(folder):
    return LLM(folder, **engine_options(DataOptions(**OPTIONS)))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("heads")
    runs.write(path, layers=LAYERS)
    return path


@pytest.fixture(scope="module")
def target(root):
    source = checkpoints.resolve(str(root / "target"))
    return source, load(root / "target")


QUICK = [name for name in SHAPES if name != "dspark with all ids"]  # another has rare ids, another one all ids
ALL = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.thorough) for name in SHAPES]


@pytest.fixture(scope="module", params=ALL)
def head(root, target, request, tmp_path_factory):
    """(its method, as it begins but with numbers in all places, its folder)."""
    name = request.param.split()[0]
    method, asked = implementation(name), options(root, "x", name, **SHAPES[request.param])
    found = method.new(asked, target[1], np.arange(runs.VOCAB)[::-1], make_placement())
    rng = np.random.default_rng(0)
    noisy = lambda x: x + (0.3 if x.ndim == 1 else 0.1) * rng.standard_normal(x.shape).astype(np.float32)
    params = {name: x if x.dtype == jnp.int32 else jnp.asarray(noisy(x)) for name, x in found.params.items()}
    folder = tmp_path_factory.mktemp(request.param) / "head"
    method.save(folder, params, found.config, "0" * 64)
    return name, Model(found.config, params), folder
