"""paged_attention on TPU: flash attention over pages, which are copied from HBM into two buffers in turn.

A page holds all key-value heads. One program has a block of query rows of all of them, so that a page is fetched once.
The running softmax is that of FlashAttention (Dao et al., arxiv.org/abs/2205.14135).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._hbm import in_hbm
from pallas_kernels.tree_mask import FIRST_NODE, POSITION, WORDS, sees

# Sizes of a program, within the 16 MiB of VMEM that a v5e gives it by default.
MAX_ROWS, ROWS_BYTES = (
    256,
    4 * 2**20,
)  # query rows of a key-value head; bytes of all heads' queries, results and sums
MAX_KEYS, PAGES_BYTES = 256, 2 * 2**20  # keys fetched at a time; bytes of the two page buffers
MASKED = -1e30  # below every real score, yet finite, so that a difference is 0, not NaN


def fits(query, pages, *_, **options) -> bool:
    """Return whether the kernel covers these arguments."""
    return query.shape[-1] % 64 == 0 and 2 * page_bytes(pages) <= PAGES_BYTES


def page_bytes(pages) -> int:
    """Return the bytes of a page, padded as in VMEM."""
    _, s, g2, d = pages.shape
    return s * _round_up(g2, 8) * _round_up(d, 128) * pages.dtype.itemsize


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "device"))
def paged_attention(query, pages, block_table, kv_len, num_keys=None, tree=None, *, scale, window, soft_cap, device):
    b, t, h, d = query.shape
    _, s, g2, _ = pages.shape
    n = block_table.shape[1]
    g = g2 // 2
    group = h // g
    rows = t * group  # row r of a key-value head: token r // group, head r % group within the group
    lanes = _round_up(d, 128)
    row_bytes = lanes * (4 * query.dtype.itemsize + 4) + 2 * 128 * 4  # query and out twice each, acc; top, total
    block_rows = min(_round_up(rows, 16), MAX_ROWS, max(16, ROWS_BYTES // (g * row_bytes) // 16 * 16))
    padded_rows = _round_up(rows, block_rows)
    block_pages = max(1, min(MAX_KEYS // s, PAGES_BYTES // (2 * page_bytes(pages))))  # at least one, of any page size

    query = query.reshape(b, t, g, group, d).swapaxes(1, 2).reshape(b, g, rows, d)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, padded_rows - rows), (0, 0)))
    spec = pl.BlockSpec((None, g, block_rows, d), lambda row, block, *_: (row, 0, block, 0))
    # Each program gets only its row's line of the table: the whole table may exceed scalar memory.
    table_spec = pl.BlockSpec((None, 1, n), lambda row, *_: (row, 0, 0), memory_space=pltpu.SMEM)
    nodes, node_specs = [], []
    if tree is not None:  # a line for each query row
        nodes = [jnp.pad(jnp.repeat(tree, group, axis=1), ((0, 0), (0, padded_rows - rows), (0, 0)))]
        node_specs = [pl.BlockSpec((None, block_rows, tree.shape[2]), lambda row, block, *_: (row, block, 0))]
    out = pl.pallas_call(
        functools.partial(_kernel, num_tokens=t, group=group, scale=scale, window=window, soft_cap=soft_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, padded_rows // block_rows),
            in_specs=[table_spec, spec, pl.BlockSpec(memory_space=pl.ANY), *node_specs],
            out_specs=spec,
            scratch_shapes=[
                pltpu.VMEM((2, block_pages, s, g2, d), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((g, block_rows, 1), jnp.float32),
                pltpu.VMEM((g, block_rows, 1), jnp.float32),
                pltpu.VMEM((g, block_rows, d), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        interpret=device.interpret,
        name="paged_attention",
    )(kv_len, kv_len if num_keys is None else num_keys, block_table[:, None], query, in_hbm(pages, device), *nodes)
    return out[:, :, :rows].reshape(b, g, t, group, d).swapaxes(1, 2).reshape(b, t, h, d)


def _kernel(
    kv_len, num_keys, block_table, query, pages, *refs,
    num_tokens, group, scale, window, soft_cap,
):  # fmt: skip
    *nodes, out, buffer, semaphores, top, total, acc = refs
    row, (g, block_rows, d) = pl.program_id(0), query.shape
    _, block_pages, s, _, _ = buffer.shape
    num_pages, row_pages = pages.shape[0], block_table.shape[1]
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None

    first_row = pl.program_id(1) * block_rows
    position = kv_len[row] - num_tokens  # of the row's first query
    first_query = position + first_row // group
    last_query = position + jnp.minimum((first_row + block_rows - 1) // group, num_tokens - 1)
    query_at = position + (first_row + lax.broadcasted_iota(jnp.int32, (block_rows, 1), 0)) // group

    if nodes:
        tree = nodes[0][...]

        def of_query(i):
            return tree[:, i : i + 1]

        query_at = of_query(POSITION)
        first_query = tree[0, FIRST_NODE]  # no query has a lower position
        last_query = kv_len[row] - 1  # nodes see each other across the programs of a row
    here = query_at >= 0

    # The query block reads keys [begin, end), in the pages [first_page, end_page).
    begin = 0 if window is None else jnp.maximum(first_query - window + 1, 0)
    end = jnp.minimum(jnp.clip(last_query + 1, 0, row_pages * s), num_keys[row])
    first_page, end_page = begin // s, pl.cdiv(end, s)
    num_blocks = pl.cdiv(jnp.maximum(end_page - first_page, 0), block_pages)

    def each_page(block, act):
        block_start = first_page + block * block_pages

        def copy(i, _):
            page = jnp.minimum(block_table[0, block_start + i], num_pages - 1)
            act(pltpu.make_async_copy(pages.at[page], buffer.at[block % 2, i], semaphores.at[block % 2]))

        lax.fori_loop(0, jnp.minimum(block_pages, end_page - block_start), copy, None)

    def attend(block, _):
        @pl.when(block + 1 < num_blocks)
        def fetch_next():
            each_page(block + 1, lambda copy: copy.start())

        each_page(block, lambda copy: copy.wait())

        block_start = (first_page + block * block_pages) * s
        key_at = block_start + lax.broadcasted_iota(jnp.int32, (1, block_pages * s), 1)
        if nodes:
            words = [of_query(i) for i in range(WORDS, tree.shape[1])]
            visible = sees(words, key_at - of_query(FIRST_NODE))
        else:
            visible = key_at <= query_at
        visible &= here & (key_at < end)
        if window is not None:
            visible &= key_at > query_at - window
        # The buffer beyond the last page and unseen slots may hold NaN, and 0 * NaN is NaN.
        value_at = block_start + lax.broadcasted_iota(jnp.int32, (block_pages * s, 1), 0)
        used = (value_at >= begin) & (value_at < end)

        for head in range(g):
            key = buffer[block % 2, :, :, 2 * head, :].reshape(block_pages * s, d)
            value = buffer[block % 2, :, :, 2 * head + 1, :].reshape(block_pages * s, d)
            value = jnp.where(used, value, jnp.zeros_like(value))
            scores = _dot(query[head], key, 1, precision) * scale
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            scores = jnp.where(visible, scores, MASKED)

            old_top = top[head]
            new_top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.where(visible, jnp.exp(scores - new_top), 0.0)
            shrink = jnp.exp(old_top - new_top)
            top[head] = new_top
            total[head] = total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            acc[head] = acc[head] * shrink + _dot(weights.astype(value.dtype), value, 0, precision)

    top[...] = jnp.full_like(top, MASKED)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

    @pl.when(num_blocks > 0)
    def fetch_first():
        each_page(0, lambda copy: copy.start())

    lax.fori_loop(0, num_blocks, attend, None)
    out[...] = (acc[...] / jnp.where(total[...] > 0, total[...], 1.0)).astype(out.dtype)


def _dot(x, y, contracted, precision):
    """Return x [M, K] times y in float32, contracted over axis `contracted` of y."""
    dimensions = (((1,), (contracted,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _round_up(n, multiple):
    """Return the least multiple that is not below n."""
    return pl.cdiv(n, multiple) * multiple
