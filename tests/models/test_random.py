"""Random weights: of the scale that was asked for, each array its own, and the same again for a seed."""

import jax.numpy as jnp
import numpy as np

from jaxspec.bench.presets import preset
from jaxspec.models.decoder import normal, random_params
from jaxspec.parallel.placement import make_placement


def test_random_weights():
    config = preset("tiny")
    first, again, other = (random_params(config, jnp.float32, make_placement(), seed) for seed in (0, 0, 1))
    large = [name for name in first if not name.endswith("norm")]
    assert len(large) > config.num_layers
    seen = {np.asarray(params[name]).tobytes() for params in (first, other) for name in large}
    assert len(seen) == 2 * len(large)
    for name in large:
        assert (first[name] == again[name]).all(), name
        fan_in = first[name].shape[-1 if name == "embed" else 0]
        np.testing.assert_allclose(np.std(first[name]) * fan_in**0.5, 1, atol=0.05, err_msg=name)


def test_a_program_a_shape():
    """Not one a weight: compiling those would take longer than anything else."""
    normal.cache_clear()
    params = random_params(preset("tiny"), jnp.float32, make_placement())
    shapes = {w.shape for name, w in params.items() if not name.endswith("norm")}
    assert normal.cache_info().currsize == len(shapes) < len(params) / 2
