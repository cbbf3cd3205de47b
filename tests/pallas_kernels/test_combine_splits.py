"""The kernel that combines the splits of a row's keys, against softmax over all keys in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._combine_splits import combined
from pallas_kernels.device import CPU, here
from pallas_kernels.paged_attention.gpu import LEAST
from pallas_kernels.weights import interleaved_grouped
from tests.pallas_kernels.flavours import in_two_numbers


@pytest.mark.parametrize("device", [CPU, pytest.param("here", marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_splits_give_the_softmax_over_all_keys(device, axis):
    """Splits without keys count for nothing, and a row without any key is 0."""
    draw, splits, keys, d = np.random.default_rng(axis), 17, 5, 24
    scores = 9 * draw.normal(size=(3, 2, splits, keys))
    scores[0, 0, 4:] = -np.inf
    scores[1, 1] = -np.inf
    values = draw.normal(size=(3, 2, splits, keys, d))
    top = np.where(np.isinf(scores).all(-1), LEAST, scores.max(-1))
    weights = np.exp2(scores - top[..., None])
    parts = (weights[..., None] * values).sum(-2), top, weights.sum(-1)
    acc, top, total = (jnp.asarray(np.moveaxis(part, 2, axis), jnp.float32) for part in parts)
    found, _ = combined(acc, top, total, axis=axis, dtype=jnp.float32, device=here() if device == "here" else device)
    every = np.exp2(scores - scores.max((-1, -2), keepdims=True, where=np.isfinite(scores), initial=-1e3))
    expected = np.einsum("abij,abijd->abd", every, values) / np.maximum(every.sum((-1, -2)), 1e-9)[..., None]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("device", [CPU, pytest.param("here", marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((4, 3, 2, 64), 1), ((3, 2, 8, 64), 0)], ids=["one token", "two tokens"])
def test_the_sums_that_the_next_product_reads(device, shape, axis):
    """With eight heads, each token has the sums of groups of its heads' results, one head after the other."""
    draw, device = np.random.default_rng(axis), here() if device == "here" else device
    acc, total = (jnp.asarray(draw.uniform(1, 2, size), jnp.float32) for size in (shape, shape[:-1]))
    mixed, sums = combined(acc, total, total, axis=axis, dtype=jnp.bfloat16, heads=8, device=device)
    expected = interleaved_grouped.summed(mixed.reshape(-1, 8 * 64)).sums
    np.testing.assert_allclose(in_two_numbers(sums).sum(2), in_two_numbers(expected).sum(2), rtol=2**-15)
