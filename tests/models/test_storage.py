"""How parameters lie: turned for programs on one CPU, as they are elsewhere, and seen alike everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.decoder import weight_bytes
from jaxspec.models.layers import Backend
from jaxspec.models.storage import OutputFirst, stored_for
from jaxspec.parallel.placement import make_placement
from pallas_kernels.device import CPU, Device
from tests import tiny_models
from tests.models import forward

STREAMS = Backend(CPU, make_placement())
CONFIG = tiny_models.FAMILIES["llama3"]  # with a head of its own


def test_matrices_lie_output_first_and_are_seen_input_first():
    plain = dict(tiny_models.model(CONFIG).params)
    stored = stored_for(STREAMS, CONFIG, dict(plain))
    assert isinstance(stored, OutputFirst)
    assert list(stored) == list(plain)
    assert len(stored) == len(plain)
    for name in ("layers.0.qkv", "layers.1.out", "layers.0.gate_up", "layers.1.down", "head"):
        assert stored.stored[name].shape == plain[name].shape[::-1], name
    for name in ("embed", "norm", "layers.0.input_norm"):
        assert stored.stored[name] is plain[name], name
    for name, array in plain.items():
        np.testing.assert_array_equal(stored[name], array, err_msg=name)
    assert stored_for(STREAMS, CONFIG, stored) is stored
    assert weight_bytes(CONFIG, stored) == weight_bytes(CONFIG, plain)


def test_a_dict_is_emptied_on_the_way():
    params = dict(tiny_models.model(CONFIG).params)
    stored_for(STREAMS, CONFIG, params)
    assert not params
    model = tiny_models.model(CONFIG)
    engine = tiny_models.engine(model)
    assert isinstance(engine.runner.params["target"], OutputFirst)
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


def test_several_devices_and_bfloat16_leave_them_as_they_are():
    params = {name: x.astype(jnp.bfloat16) for name, x in tiny_models.model(CONFIG).params.items()}
    assert stored_for(STREAMS, CONFIG, params) is params
    if jax.device_count() < 2:
        pytest.skip("wants 2 devices: --xla_force_host_platform_device_count")
    assert not Backend(CPU, make_placement(2)).streams


def test_a_pass_is_the_same():
    """Chunks of one, two, five and more rows, each by its own form of the products."""
    model, tokens = tiny_models.model(CONFIG), np.random.default_rng(0).integers(0, 64, size=(1, 28))
    chunks = (20, 1, 2, 5)
    plain = forward.run(CONFIG, model.params, tokens, chunks)
    np.testing.assert_allclose(
        forward.run(CONFIG, stored_for(STREAMS, CONFIG, dict(model.params)), tokens, chunks), plain, atol=1e-5
    )
