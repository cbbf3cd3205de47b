"""The kernel that combines the splits of a row's keys, against softmax over all keys in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._combine_splits import combined
from pallas_kernels.device import CPU, here
from pallas_kernels.paged_attention.gpu import LEAST


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
    found = combined(acc, top, total, axis=axis, dtype=jnp.float32, device=here() if device == "here" else device)
    every = np.exp2(scores - scores.max((-1, -2), keepdims=True, where=np.isfinite(scores), initial=-1e3))
    expected = np.einsum("abij,abijd->abd", every, values) / np.maximum(every.sum((-1, -2)), 1e-9)[..., None]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
