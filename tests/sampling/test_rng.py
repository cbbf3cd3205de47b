"""Keys: a function of seed, position, purpose and offset, and of nothing else."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxspec.sampling import rng


def words(*seeds: int) -> jax.Array:
    return jnp.array([rng.seed_words(s) for s in seeds], jnp.uint32)


def data(*args) -> np.ndarray:
    return np.asarray(jax.random.key_data(rng.keys(*args)))


def test_keys_do_not_depend_on_other_rows():
    seeds, positions, offsets = words(5, 6, 7, 2**63), jnp.array([3, 9, 4, 70_000]), jnp.array([0, 1, 2, 0])
    together = data(seeds, positions, "accept", offsets)
    for i in range(4):
        row = slice(i, i + 1)
        np.testing.assert_array_equal(data(seeds[row], positions[row], "accept", offsets[row])[0], together[i])
    noise = rng.gumbel(rng.keys(seeds, positions, "shared"), 9)
    alone = rng.gumbel(rng.keys(seeds[2:3], positions[2:3], "shared"), 9)
    np.testing.assert_array_equal(noise[2], alone[0])


def test_no_two_uses_share_a_key():
    seen = set()
    seeds, positions = (0, 1, 2, 1 << 32, (1 << 32) + 1, -1, -(2**63)), jnp.arange(6)
    for seed, purpose, offset in itertools.product(seeds, rng.PURPOSES, range(5)):
        keys = data(jnp.tile(words(seed), (6, 1)), positions, purpose, offset)
        seen |= {tuple(k) for k in keys.tolist()}
    assert len(seen) == len(seeds) * len(rng.PURPOSES) * 5 * 6


def test_purposes_are_distinct():
    assert len(set(rng.PURPOSES.values())) == len(rng.PURPOSES) == 4


def test_an_offset_may_be_a_number_or_an_array():
    seeds, positions = words(1, 2), jnp.array([4, 4])
    np.testing.assert_array_equal(
        data(seeds, positions, "residual", 3), data(seeds, positions, "residual", jnp.array([3, 3]))
    )


def test_a_row_may_have_some():
    seeds, positions = words(1, 2, 3), jnp.arange(12).reshape(3, 4)
    offsets = positions % 3
    some = data(seeds, positions, "shared", offsets)
    every = rng.keys(seeds, positions, "shared", offsets)
    noise, one = rng.gumbel(every, 5), rng.uniform(every)
    for i in range(4):
        keys = rng.keys(seeds, positions[:, i], "shared", offsets[:, i])
        np.testing.assert_array_equal(some[:, i], jax.random.key_data(keys))
        np.testing.assert_array_equal(noise[:, i], rng.gumbel(keys, 5))
        np.testing.assert_array_equal(one[:, i], rng.uniform(keys))


def test_seeds_have_64_bits():
    assert rng.seed_words((7 << 32) + 9) == (7, 9)
    assert rng.seed_words(-1) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert rng.seed_words(-(2**63)) == (1 << 31, 0)
    assert rng.seed_words(2**64 - 1) == rng.seed_words(-1)
    assert (data(words(9), jnp.array([1]), "draft") != data(words((7 << 32) + 9), jnp.array([1]), "draft")).any()


def test_high_and_low_word_are_not_interchangeable():
    swapped = words(1 + (2 << 32), 2 + (1 << 32))
    a, b = data(swapped, jnp.array([1, 1]), "draft")
    assert (a != b).any()


def test_gumbel_reaches_the_tail():
    """The largest of n draws lies near log(n). In the default mode, uniform numbers of 2^-23, nothing exceeds 16; with
    2e8 draws the largest is below 17 with probability 2e-4."""
    size, most = 1 << 22, 0.0
    sample = jax.jit(lambda seed: jnp.max(rng.gumbel(rng.keys(seed, jnp.zeros(1, jnp.int32), "draft"), size)))
    for seed in (8, *range(48)):  # the first has such a draw
        most = max(most, float(sample(words(seed))))
        if most > 17:
            break
    assert most > 17
    ends = jnp.array([0, 1, 2**32 - 1], jnp.uint32)
    assert jnp.isfinite(rng.gumbel(rng.keys(jnp.stack([ends, ends], 1), ends.astype(jnp.int32), "draft"), 64)).all()


def test_the_noise_has_its_distribution():
    keys = rng.keys(jnp.tile(words(3), (40_000, 1)), jnp.arange(40_000), "accept")
    uniform = np.asarray(rng.uniform(keys))
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert stats.kstest(uniform, "uniform").pvalue > 1e-4
    assert stats.kstest(np.asarray(rng.gumbel(keys, 1))[:, 0], "gumbel_r").pvalue > 1e-4
    # Neighbouring positions are not correlated: below 5 standard deviations.
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 5 / 40_000**0.5


def test_take_row_reads_each_rows_own_index():
    x = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    np.testing.assert_array_equal(rng.take_row(jnp.asarray(x), jnp.array([2, 0])), x[[0, 1], [2, 0]])
    np.testing.assert_array_equal(rng.take_row(jnp.asarray(x[..., 0]), jnp.array([1, 2])), x[[0, 1], [1, 2], 0])
