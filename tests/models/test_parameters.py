"""What is declared of each parameter, and what follows from it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxspec.models.decoder import abstract_params, describe, parameters, random_params, weight_bytes
from jaxspec.parallel.placement import AXES, make_placement
from tests.support import tiny_models

GEMMA = tiny_models.FAMILIES["gemma3"]
DRAFT = dataclasses.replace(
    tiny_models.FAMILIES["qwen2"], tied=False, reduced_vocab_size=24, rare_vocab_size=8, rare_width=4, embed_width=40
)
# Last part of a name -> kind, axes, whether only logits read it, whether it is trained.
DECLARED = {
    "embed": ("table", ("vocab", None), False, False),
    "embed_in": ("matrix", (None, None), False, True),
    "d2t": ("ids", (None,), False, False),
    "t2d": ("ids", (None,), False, False),
    "input_norm": ("norm", (None,), False, True),
    "qkv": ("matrix", (None, "heads"), False, True),
    "qkv_bias": ("bias", ("heads",), False, True),
    "out": ("matrix", ("heads", None), False, True),
    "mlp_norm": ("norm", (None,), False, True),
    "gate_up": ("matrix", (None, "mlp"), False, True),
    "down": ("matrix", ("mlp", None), False, True),
    "norm": ("norm", (None,), False, True),
    "head": ("matrix", (None, "vocab"), True, True),
    "rare_in": ("matrix", (None, None), True, True),
    "rare_head": ("matrix", (None, "vocab"), True, True),
}


def test_a_draft_declares():
    found = {name.rsplit(".", 1)[-1]: (p.kind, p.axes, p.head, p.trained) for name, p in parameters(DRAFT).items()}
    assert found == DECLARED


@pytest.mark.parametrize("config", [*tiny_models.FAMILIES.values(), DRAFT], ids=[*tiny_models.FAMILIES, "draft"])
def test_what_is_declared_is_what_there_is(config):
    _, variables = describe(config, "bfloat16")
    known = parameters(config, "bfloat16")
    for name, leaf in zip(known, variables.values(), strict=True):
        p, value = known[name], leaf.get_value()
        assert (p.shape, p.dtype) == (value.shape, value.dtype), name
        assert p.dtype == {"norm": jnp.float32, "ids": jnp.int32}.get(p.kind, jnp.bfloat16), name
        assert len(p.axes) == len(p.shape), name
        assert issubclass(type(leaf), nnx.Param) == p.trained, name
        assert not p.parts or p.shape[-1] % sum(dict(p.parts).values()) == 0, name


def test_a_tied_table_is_the_head():
    assert parameters(GEMMA)["embed"].head
    assert not parameters(tiny_models.FAMILIES["llama3"])["embed"].head


def test_bytes_of_a_draft_pass():
    """The rare ids' two products are read for logits only, the target's table not at all."""
    params = random_params(DRAFT, jnp.bfloat16, make_placement())
    size = lambda *names: sum(params[name].nbytes for name in names)
    whole = sum(x.nbytes for x in params.values())
    assert weight_bytes(DRAFT, params) == whole - size("embed")
    assert weight_bytes(DRAFT, params, logits=False) == whole - size("embed", "head", "rare_in", "rare_head")


def test_where_they_lie():
    """On two devices; a vocabulary that two do not divide stays whole."""
    odd = dataclasses.replace(tiny_models.FAMILIES["llama3"], vocab_size=63)
    try:
        mesh = make_placement(2)
    except ValueError:
        pytest.skip("wants 2 devices: --xla_force_host_platform_device_count")
    lies = {name: p.sharding.spec for name, p in abstract_params(odd, "float32", mesh).items()}
    assert lies["embed"] == lies["head"] == P(None, None)
    assert abstract_params(DRAFT, "float32", mesh)["rare_head"].sharding.spec == P(None, AXES)
    assert lies["layers.0.qkv"] == P(None, AXES)
    assert lies["layers.1.out"] == lies["layers.1.down"] == P(AXES, None)
    assert lies["layers.0.mlp_norm"] == P(None)


def test_random_ids_are_the_first():
    params = random_params(DRAFT, jnp.float32, make_placement())
    np.testing.assert_array_equal(params["d2t"], np.arange(24))
    np.testing.assert_array_equal(params["t2d"], np.minimum(np.arange(64), 24))
