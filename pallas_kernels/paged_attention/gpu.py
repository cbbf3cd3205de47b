"""paged_attention on GPU: flash attention over pages, the keys of a row split over several programs.

Splitting follows Flash-Decoding (crfm.stanford.edu/2023/10/12/flashdecoding.html): each program leaves its weighted
sum, its largest score and its total weight, and a small jnp epilogue combines them. The number of splits depends on
static shapes of a row only, never on the batch, so a row's result does not depend on its neighbours.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

MIN_ROWS, MAX_ROWS = 16, 64  # query rows of a program: tl.dot wants at least 16
SPLIT_KEYS, MAX_SPLITS = 128, 16
MASKED = -1e30  # a score that no real one undercuts, yet finite: differences of two stay 0, not NaN


def paged_attention(query, pages, block_table, kv_len, *, scale, window, soft_cap, interpret=False):
    (b, t, h, d), (p, s, g2, _), n = query.shape, pages.shape, block_table.shape[1]
    g = g2 // 2
    rows = t * h // g
    block_rows = min(max(pl.next_power_of_2(rows), MIN_ROWS), MAX_ROWS)
    row_blocks = pl.cdiv(rows, block_rows)
    splits = max(1, min(pl.cdiv(n * s, SPLIT_KEYS), MAX_SPLITS) // row_blocks)
    block_d = max(pl.next_power_of_2(d), 16)
    block_keys = 64 if block_d * pages.dtype.itemsize <= 512 else 32  # keys and values stay within shared memory

    acc, top, total = pl.pallas_call(
        functools.partial(
            _kernel, num_tokens=t, page_size=s, window=window, scale=scale, soft_cap=soft_cap,
            splits=splits, block_rows=block_rows, block_keys=block_keys, block_d=block_d,
        ),
        grid=(b, g, row_blocks * splits),
        out_shape=[
            jax.ShapeDtypeStruct((splits, b, t * h, d), jnp.float32),
            jax.ShapeDtypeStruct((splits, b, t * h), jnp.float32),
            jax.ShapeDtypeStruct((splits, b, t * h), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_attention",
    )(query.reshape(b, t * h, d), pages.reshape(p * s, g2, d), block_table, kv_len)  # fmt: skip

    shrink = jnp.exp(top - jnp.max(top, axis=0))
    total = jnp.sum(total * shrink, axis=0)
    acc = jnp.sum(acc * shrink[..., None], axis=0)
    return (acc / jnp.where(total > 0, total, 1)[..., None]).reshape(query.shape).astype(query.dtype)


def _kernel(
    query, pages, block_table, kv_len, acc_out, top_out, total_out, *,
    num_tokens, page_size, window, scale, soft_cap, splits, block_rows, block_keys, block_d,
):  # fmt: skip
    (num_slots, g2, d), row_pages = pages.shape, block_table.shape[1]
    h = query.shape[1] // num_tokens
    group = h // (g2 // 2)
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    b, head = pl.program_id(0), pl.program_id(1)
    row_block, split = pl.program_id(2) // splits, pl.program_id(2) % splits

    first_row = row_block * block_rows
    row = first_row + jnp.arange(block_rows, dtype=jnp.int32)
    token = row // group
    line = token * h + head * group + row % group  # in query and output: [B, T * H]; beyond them where not `here`
    column = jnp.arange(block_d, dtype=jnp.int32)
    here = token < num_tokens
    q = plgpu.load(query.at[b, line[:, None], column[None, :]], mask=here[:, None] & (column < d)[None, :], other=0)

    # The block reads keys [begin, end), this program [split_begin, split_end) of them.
    position = kv_len[b] - num_tokens  # of the row's first query
    query_at = position + token
    last_query = position + jnp.minimum((first_row + block_rows - 1) // group, num_tokens - 1)
    begin = 0 if window is None else jnp.maximum(position + first_row // group - window + 1, 0)
    end = jnp.clip(last_query + 1, 0, row_pages * page_size)
    split_keys = pl.cdiv(pl.cdiv(jnp.maximum(end - begin, 0), splits), block_keys) * block_keys
    split_begin = begin + split * split_keys
    split_end = jnp.minimum(split_begin + split_keys, end)

    def attend(i, carry):
        top, total, acc = carry
        key_at = split_begin + i * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
        used = key_at < split_end
        key_at = jnp.where(used, key_at, 0)
        page = jnp.minimum(plgpu.load(block_table.at[b, key_at // page_size]), num_slots // page_size - 1)
        slot = page * page_size + key_at % page_size
        mask = used[:, None] & (column < d)[None, :]
        key = plgpu.load(pages.at[slot[:, None], 2 * head, column[None, :]], mask=mask, other=0)
        value = plgpu.load(pages.at[slot[:, None], 2 * head + 1, column[None, :]], mask=mask, other=0)

        scores = plgpu.dot(q, key, trans_b=True, precision=precision) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        visible = used[None, :] & (key_at[None, :] <= query_at[:, None])
        if window is not None:
            visible &= key_at[None, :] > query_at[:, None] - window
        scores = jnp.where(visible, scores, MASKED)

        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.where(visible, jnp.exp(scores - new_top[:, None]), 0.0)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=1)
        acc = acc * shrink[:, None] + plgpu.dot(weights.astype(value.dtype), value, precision=precision)
        return new_top, total, acc

    carry = (
        jnp.full(block_rows, MASKED, jnp.float32),
        jnp.zeros(block_rows, jnp.float32),
        jnp.zeros((block_rows, block_d), jnp.float32),
    )
    num_blocks = pl.cdiv(jnp.maximum(split_end - split_begin, 0), block_keys)
    top, total, acc = lax.fori_loop(0, num_blocks, attend, carry)

    plgpu.store(top_out.at[split, b, line], top, mask=here)
    plgpu.store(total_out.at[split, b, line], total, mask=here)
    mask = here[:, None] & (column < d)[None, :]
    plgpu.store(acc_out.at[split, b, line[:, None], column[None, :]], acc, mask=mask)
