"""Asking for the next kernel early: where it can be done, and only there."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import use_abstract_mesh

from pallas_kernels import _overlap
from pallas_kernels._split_product import split_product
from tests.pallas_kernels.test_gpu_lowering import MESH


@pytest.mark.parametrize(
    ("capability", "expected"), [("9.0", True), ("10.3", True), ("8.9", False), ("gfx942", False), (None, False)]
)
def test_only_from_hopper_on(monkeypatch, capability, expected):
    device = types.SimpleNamespace(**({} if capability is None else {"compute_capability": capability}))
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert _overlap.available() is expected


@pytest.mark.parametrize("available", [False, True])
def test_a_kernel_asks_only_where_that_can_be_done(monkeypatch, available):
    monkeypatch.setattr(_overlap, "available", lambda: available)
    x, weights = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((1024,), (1024, 512)))
    with use_abstract_mesh(MESH):
        product = jax.jit(lambda *a: split_product(*a)["sums"])
        text = product.trace(x, weights).lower(lowering_platforms=("cuda",)).as_text()
    assert ("griddepcontrol.launch_dependents" in text) == available
