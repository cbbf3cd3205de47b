"""Tables and logits that lie in parts: looked up and compared where they are, never put together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.models.backend import Backend
from jaxspec.models.head import of_largest
from jaxspec.models.table import looked_up
from jaxspec.parallel.placement import make_placement
from pallas_kernels.device import CPU
from tests.support import hlo
from tests.support.lively_models import PROMPTS, new_engine, params, serve

WIDTH = 8
DEGREES = [(2, 2), (4, 2), (4, 1)]  # of the target, of the draft whose table it may be


def backend(size, own):
    return Backend(CPU, make_placement(size, draft_size=own).draft, None)


@pytest.mark.parametrize(("size", "own"), DEGREES)
@pytest.mark.parametrize("vocab_size", [64, 63])  # the latter does not divide
@pytest.mark.parametrize("ids", [[[5]], [[0, 63, 31], [32, 15, 16]], [[64, 1000, -1]]])
def test_rows_of_a_table(size, own, vocab_size, ids):
    table = np.random.default_rng(0).normal(size=(vocab_size, WIDTH)).astype(np.float32)
    where, ids = backend(size, own), jnp.asarray(ids, jnp.int32)
    placed = jax.device_put(table, where.placement.of_parameter(("vocab", None), table.shape))
    found = jax.jit(lambda table, ids: looked_up(table, ids, where))(placed, ids)
    np.testing.assert_array_equal(np.asarray(found), table[np.clip(ids, 0, vocab_size - 1)])


@pytest.mark.parametrize(("size", "own"), DEGREES)
@pytest.mark.parametrize("count", [None, 90, 40, 3])
def test_the_place_of_the_largest(size, own, count):
    """Of two products' logits, the second of which does not divide: as of all of them side by side, ties too."""
    rng, where = np.random.default_rng(size), backend(size, own)
    parts = [rng.integers(0, 4, (2, 3, n)).astype(np.float32) for n in (64, 27)]  # many are equal
    parts[0][0, 0] = -np.inf
    parts[1][0, 0, :-1] = -np.inf
    cut = P(None, None, where.placement.axes)
    placed = [jax.device_put(parts[0], where.placement.sharding(cut)), jnp.asarray(parts[1])]
    found = jax.jit(lambda *parts: of_largest(parts, where, count))(*placed)
    np.testing.assert_array_equal(np.asarray(found), np.concatenate(parts, axis=-1)[..., :count].argmax(axis=-1))


def test_one_row_sends_next_to_nothing():
    """No logits. That no table is sent, which only a GPU's compiler would do, tests/nvidia/test_compiled.py shows."""
    two = new_engine("plain", 0, "llama", tensor_parallel_size=2, max_num_seqs=1)
    serve(two, PROMPTS[:1], params((8,)))
    (program,) = [p.result() for key, p in two.runner.programs.compiled.items() if key[0] == "launch"]
    sent = [i for i in hlo.Program(program.as_text()).all if hlo.collectives([i])]
    config = two.runner.configs["target"]
    assert hlo.collectives(sent).keys() == {"all-reduce", "all-gather"}
    assert max(size for i in sent for size in i.sizes) <= config.width
