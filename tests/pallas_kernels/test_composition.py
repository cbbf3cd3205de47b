"""All four ops together where they are used: in a while_loop, jitted, with the heads sharded over two devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import kv_write, merge_tokens, paged_attention, slot_mapping
from tests.support.sizes import cases

NUM_PAGES, PAGE_SIZE, ROW_PAGES, ROWS, H, G, D = 8, 4, 3, 2, 4, 2, 64


def decode(pages, kv, query, block_table, implementation):
    """Three rounds; in each, row b stands at position 2 * round, and takes one token and its next one."""
    options = {"implementation": implementation, "platform": "cpu"}
    query_start = jnp.arange(ROWS + 1, dtype=jnp.int32)
    last = jnp.full(ROWS, 2, jnp.int32)

    def round_(carry):
        i, pages, outputs = carry
        first = last * i
        positions, rejected = merge_tokens(first, first + 1, query_start, jnp.zeros(ROWS, jnp.int32), **options)
        limits = {"page_size": PAGE_SIZE, "max_model_len": 12, "pad_slot": NUM_PAGES * PAGE_SIZE}
        slots = slot_mapping(positions, rejected, query_start, block_table, **limits, **options)
        pages = kv_write(pages, kv[i], slots, **options)
        out = paged_attention(query[i], pages, block_table, first + 2, scale=0.1, **options)
        return i + 1, pages, outputs.at[i].set(out)

    return lax.while_loop(lambda carry: carry[0] < 3, round_, (0, pages, jnp.zeros_like(query)))[1:]


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@cases("num_devices", [1, 2], quick=[2])
def test_rounds_in_a_loop(implementation, num_devices):
    if jax.default_backend() != "cpu" or jax.device_count() < num_devices:
        pytest.skip(f"wants {num_devices} CPU devices: --xla_force_host_platform_device_count")
    draw = np.random.default_rng(0)
    pages = np.zeros((NUM_PAGES, PAGE_SIZE, 2 * G, D), np.float32)
    kv = draw.normal(size=(3, 2 * ROWS, 2 * G, D)).astype(np.float32)
    query = draw.normal(size=(3, ROWS, 2, H, D)).astype(np.float32)
    block_table = np.array([[5, 2, 8], [1, 7, 8]], np.int32)

    mesh = jax.make_mesh((num_devices,), ("model",), (AxisType.Auto,), devices=jax.devices()[:num_devices])
    heads = Spec(None, None, "model"), Spec(None, None, "model"), Spec(None, None, None, "model")
    function = jax.shard_map(
        functools.partial(decode, implementation=implementation),
        mesh=mesh, in_specs=(*heads, Spec()), out_specs=(heads[0], heads[2]), check_vma=False,
    )  # fmt: skip
    written, outputs = jax.jit(function)(pages, kv, query, block_table)

    for row, row_pages in enumerate(block_table):
        cache = np.concatenate([kv[i, 2 * row : 2 * row + 2] for i in range(3)])  # [6, 2G, D]
        np.testing.assert_array_equal(np.asarray(written)[row_pages[:2]].reshape(8, 2 * G, D)[:6], cache)
        for i in range(3):
            for token in range(2):
                seen = cache[: 2 * i + token + 1]
                for head in range(H):
                    group = head // (H // G)
                    weights = np.exp(seen[:, 2 * group] @ query[i, row, token, head] * 0.1)
                    expected = weights @ seen[:, 2 * group + 1] / weights.sum()
                    np.testing.assert_allclose(outputs[i, row, token, head], expected, rtol=0, atol=2e-5)
