"""How parameters lie: turned for programs on one CPU, and in bfloat16 where that holds the same numbers; as they are
elsewhere, and seen alike everywhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.bench.models import as_published
from jaxspec.loading.weights import resharded
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import compute_dtype, weight_bytes
from jaxspec.models.model import Model
from jaxspec.models.storage import narrow, stored_for
from jaxspec.parallel.placement import make_placement
from pallas_kernels.device import CPU, Device
from pallas_kernels.weights import dense, grouped
from pallas_kernels.weights.interleaved import Interleaved
from pallas_kernels.weights.interleaved_grouped import InterleavedGrouped
from pallas_kernels.weights.output_first import Streamed
from pallas_kernels.weights.scaled import quantise
from tests.models import forward
from tests.support import lively_models, tiny_models
from tests.support.sizes import cases

STREAMS = Backend(CPU, make_placement())
LAYOUTS = {
    "32": grouped.in_four_bits(32),
    "128, zeros": grouped.in_four_bits(128, zeros=True),
    "96": grouped.in_four_bits(96),  # no divisor of a chunk
    "all": grouped.in_four_bits(0),
}
CONFIG = tiny_models.FAMILIES["llama3"]  # with a head of its own


def test_matrices_lie_output_first_and_are_seen_input_first():
    plain = dict(tiny_models.model(CONFIG).params)
    stored = stored_for(STREAMS, CONFIG, dict(plain))
    assert list(stored) == list(plain)
    for name in ("layers.0.qkv", "layers.1.out", "layers.0.gate_up", "layers.1.down", "head"):
        assert isinstance(stored[name], Streamed), name
        assert stored[name].array.shape == plain[name].shape[::-1], name
    for name in ("embed", "norm", "layers.0.input_norm"):
        assert stored[name] is plain[name], name
    for name, array in plain.items():
        np.testing.assert_array_equal(dense(stored[name]), array, err_msg=name)
    assert stored_for(STREAMS, CONFIG, stored) is stored
    assert weight_bytes(CONFIG, stored) == weight_bytes(CONFIG, plain)


def test_a_dict_is_emptied_on_the_way():
    params = dict(tiny_models.model(CONFIG).params)
    stored_for(STREAMS, CONFIG, params)
    assert not params
    model = tiny_models.model(CONFIG)
    engine = tiny_models.engine(model)
    assert isinstance(engine.runner.params["target"]["layers.0.qkv"], Streamed)
    assert len(model.params) == len(engine.runner.params["target"]), "the engine took what is somebody else's"


@pytest.mark.parametrize(
    "backend",
    [Backend(Device("gpu")), Backend(Device("tpu")), Backend(CPU, None, "reference"), Backend(CPU, None, "pallas")],
    ids=str,
)
def test_others_leave_them_as_they_are(backend):
    params = dict(tiny_models.model(CONFIG).params)
    assert stored_for(backend, CONFIG, params) is params
    assert params


def test_hopper_has_the_inputs_of_8_bit_matrices_reordered():
    """Matrices that its kernels do not read keep their natural order, and nothing else changes."""
    known = {name: jnp.asarray(np.random.default_rng(0).normal(size=(256, 128)), "bfloat16") for name in "abc"}
    blocks = {"a": (256, 1), "b": (128, 128), "c": (64, 1)}
    params = {name: quantise(x, dtype="int8", block=blocks[name]) for name, x in known.items()} | {"d": known["a"]}
    stored = stored_for(Backend(Device("gpu", (9, 0))), CONFIG, dict(params))
    assert {name: type(x) for name, x in stored.items() if x is not params[name]} == {
        "a": Interleaved,
        "b": Interleaved,
    }
    for name in "ab":
        np.testing.assert_array_equal(stored[name].natural().values, params[name].values)
        assert np.any(stored[name].values != params[name].values)
    assert stored_for(Backend(Device("gpu", (8, 0))), CONFIG, params) is params


def of_blocks(kind, shape):
    """Return a matrix of random blocks of GGUF."""
    rng = np.random.default_rng(0)

    def make(field, i, shape, dtype):
        return jnp.asarray(rng.integers(0, 64, shape) / (100 if dtype == "float16" else 1), dtype)

    return grouped.arrays(grouped.BLOCKS[kind], shape, make, "bfloat16")


def test_hopper_has_the_inputs_of_4_bit_matrices_reordered():
    """Other layouts keep their natural order."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(768, 128)), "bfloat16")
    quantised, as_dense = jax.jit(grouped.quantise, static_argnums=1), jax.jit(dense)
    params = {name: quantised(x, layout) for name, layout in LAYOUTS.items()}
    params["ordered"] = dataclasses.replace(params["32"], order=jnp.arange(768))
    params["narrow"] = quantised(x[:128], LAYOUTS["32"])
    params |= {kind: of_blocks(kind, x.shape) for kind in ("q4_0", "q4_k", "q4_1", "q8_0")}
    stored = stored_for(Backend(Device("gpu", (9, 0))), CONFIG, dict(params))
    read = {name for name, x in stored.items() if isinstance(x, InterleavedGrouped)}
    assert read == {"32", "128, zeros", "all", "q4_0", "q4_k"}
    for name, weight in stored.items():
        if name in read:
            natural = jax.jit(InterleavedGrouped.natural)(weight)
            jax.tree.map(np.testing.assert_array_equal, natural, params[name])
            np.testing.assert_array_equal(as_dense(weight), as_dense(params[name]))
            assert np.any(weight.values[0] != params[name].values[0])
        else:
            assert weight is params[name]


def test_several_devices_and_bfloat16_leave_them_as_they_are():
    params = {name: x.astype(jnp.bfloat16) for name, x in tiny_models.model(CONFIG).params.items()}
    assert stored_for(STREAMS, CONFIG, params) is params
    if jax.device_count() < 2:
        pytest.skip("wants 2 devices: --xla_force_host_platform_device_count")
    assert not Backend(CPU, make_placement(2)).streams


@pytest.mark.parametrize("halved", [False, True])
@cases("family", ["llama", "llama3"], quick=["llama"])  # whose head is its table
def test_a_pass_is_the_same(family, halved):
    """Chunks of one, two, five and more rows, each by its own form of the products."""
    config, tokens = tiny_models.FAMILIES[family], np.random.default_rng(0).integers(0, 64, size=(1, 28))
    params, chunks = published(config) if halved else tiny_models.model(config).params, (20, 1, 2, 5)
    plain, stored = forward.run(config, params, tokens, chunks), stored_for(STREAMS, config, dict(params))
    assert narrow(stored) == halved
    np.testing.assert_allclose(forward.run(config, stored, tokens, chunks), plain, atol=1e-5)


def published(config):
    """Random numbers as checkpoints in bfloat16 hold them."""
    return {name: as_published(x) for name, x in tiny_models.model(config).params.items()}


@pytest.mark.parametrize("family", ["llama", "llama3"])
def test_what_products_read_lies_in_bfloat16_where_that_holds_the_same(family):
    config = tiny_models.FAMILIES[family]
    params = published(config)
    stored = stored_for(STREAMS, config, dict(params))
    halved = {name for name, x in stored.items() if narrow({name: x})}
    read = {f"layers.{i}.{name}" for i in (0, 1) for name in ("qkv", "out", "gate_up", "down")}
    assert halved == read | {"embed" if config.tied else "head"}
    for name, array in params.items():
        np.testing.assert_array_equal(dense(stored[name]).astype(jnp.float32), array, err_msg=name)
    assert compute_dtype(stored) == compute_dtype(jax.tree.unflatten(*reversed(jax.tree.flatten(stored)))) == "float32"
    saved = sum(params[name].nbytes for name in halved) // 2
    assert weight_bytes(config, stored) == weight_bytes(config, params) - saved


@pytest.mark.parametrize("value", [1 / 3, 1 + 2**-8, np.nan], ids=str)
@pytest.mark.parametrize("name", ["layers.0.qkv", "layers.1.down", "head"])
def test_one_number_that_bfloat16_lacks_keeps_all_as_they_are(name, value):
    params = published(CONFIG)
    params[name] = params[name].at[3, 5].set(value)
    stored = stored_for(STREAMS, CONFIG, dict(params))
    assert not narrow(stored)
    np.testing.assert_array_equal(dense(stored[name]), params[name])


def test_what_no_loop_of_one_row_streams_stays_as_it_is():
    """An odd number of ids: for each token the library would be given all of it in float32."""
    config = dataclasses.replace(CONFIG, vocab_size=63)
    stored = stored_for(STREAMS, config, published(config))
    assert narrow(stored)
    assert stored["head"].array.dtype == jnp.float32


@pytest.mark.skipif(jax.device_count() < 2, reason="wants 2 devices: --xla_force_host_platform_device_count")
def test_over_several_devices_they_lie_in_float32_again():
    model = tiny_models.model(CONFIG)
    params = published(CONFIG)
    halved = dataclasses.replace(model, params=stored_for(STREAMS, CONFIG, dict(params)))
    over_two = resharded(halved, make_placement(2))
    assert over_two.dtype == halved.dtype == jnp.float32
    for name, array in params.items():
        assert over_two.params[name].dtype == array.dtype, name
        np.testing.assert_array_equal(over_two.params[name], array, err_msg=name)
    assert len(over_two.params["head"].sharding.device_set) == 2


@pytest.mark.thorough
def test_beside_a_narrow_table_a_draft_computes_as_by_itself():
    """It reads ids in its target's table, which lies in bfloat16 where that holds the same numbers."""
    found = lively_models.reduced(lively_models.target())
    params = dict(found.params)
    halved = params | {"embed": params["embed"].astype(jnp.bfloat16)}
    wide = params | {"embed": halved["embed"].astype(jnp.float32)}
    assert compute_dtype(halved) == Model(found.config, halved).dtype == jnp.float32
    logits = lambda params: forward.run(found.config, params, np.array([[3, 5, 7, 5]], np.int32), (3, 1))
    expected = logits(wide)
    np.testing.assert_array_equal(logits(halved), expected)
    stored = stored_for(STREAMS, found.config, dict(halved))
    assert compute_dtype(stored) == jnp.float32
    np.testing.assert_allclose(logits(stored), expected, atol=1e-5)
