"""paged_attention on GPU: flash attention over pages, with the keys of a row split over several programs.

The split follows Flash-Decoding (crfm.stanford.edu/2023/10/12/flashdecoding.html). Each program writes its weighted
sum, its largest score and its total weight; a small jnp epilogue combines them. If rows and heads alone give enough
programs, and the keys are few, one program takes all keys of a head. Then nothing is left to combine, and as many
copies are in flight as a multiprocessor holds.

The number of splits depends on static shapes only, so that a row's result does not depend on the rows beside it.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._overlap import start_next
from pallas_kernels._split_product import added
from pallas_kernels.paged_attention import WHOLE_KEYS
from pallas_kernels.tree_mask import FIRST_NODE, POSITION, WORDS, sees

MIN_ROWS, MAX_ROWS = 16, 64  # query rows of a program: tl.dot needs at least 16
SPLIT_KEYS, MAX_SPLITS = 128, 16  # least keys of a split, most splits of a row
PROGRAMS = 512  # with more programs, splits only add work to combine them
WHOLE_PROGRAMS = 96  # with so many programs, up to WHOLE_KEYS keys are not split
BLOCK_BYTES = 1 << 15  # of keys and values in a read; of larger reads, only one is in flight
MASKED = -1e30  # the score of an unseen key; finite, so that a difference is 0, not NaN
LEAST = -5e29  # the largest score before the first key: below all real scores, and so far above MASKED that it weighs 0
STEPS = 3  # least number if the first computes the queries: the first page ids then do not wait for a row's length
LOG2E = math.log2(math.e)  # weights are powers of 2


def num_splits(programs: int, keys: int, roomy: bool) -> int:
    """Return the number of splits of a row's keys.

    Args:
      programs: number of programs without splits.
      keys: number of keys that the block table has room for.
      roomy: whether 7 stages fit into the shared memory of a multiprocessor.
    """
    if roomy and programs >= WHOLE_PROGRAMS and keys <= WHOLE_KEYS:
        return 1
    return max(1, min(pl.cdiv(keys, SPLIT_KEYS), MAX_SPLITS, PROGRAMS // programs))


def most_rows(block_d: int, dtype, roomy: bool) -> int:
    """Return the largest number of query rows whose values fit into a program's registers.

    A float32 product holds several parts of each value. Matrix units that read from shared memory, which `roomy`
    implies (see `num_splits`), leave room for more rows.
    """
    if dtype.itemsize > 2:
        return MIN_ROWS
    return MAX_ROWS if block_d <= (128 if roomy else 64) else MAX_ROWS // 2


def keys_at_a_time(block_d: int, dtype) -> int:
    """Return the number of keys read at a time, such that they and their values fit into shared memory."""
    return 64 if block_d * dtype.itemsize <= 512 else 32


def num_stages(deep: bool, block_bytes: int) -> int:
    """Return the number of pipeline stages; deep: whether 7 fit.

    The page ids of a block are read before its keys and values. So two stages mean that one block is read ahead.
    """
    if block_bytes > BLOCK_BYTES:
        return 2
    return 7 if deep else 3


def paged_attention(query, pages, block_table, kv_len, num_keys=None, tree=None, *, scale, window, soft_cap, device):
    b, t, h, d = query.shape
    p, s, g2, _ = pages.shape
    n = block_table.shape[1]
    g = g2 // 2
    rows = t * h // g
    block_d = max(pl.next_power_of_2(d), 16)
    roomy = device.shares_much
    block_rows = min(max(pl.next_power_of_2(rows), MIN_ROWS), most_rows(block_d, pages.dtype, roomy))
    row_blocks = pl.cdiv(rows, block_rows)
    splits = num_splits(b * g * row_blocks, n * s, roomy)
    block_keys = keys_at_a_time(block_d, pages.dtype)
    shape = jax.ShapeDtypeStruct
    if splits == 1:
        outputs = {"out": shape((b, t * h, d), query.dtype)}
    else:
        parts = splits, b, t * h
        outputs = {
            "acc": shape((*parts, d), jnp.float32),
            "top": shape(parts, jnp.float32),
            "total": shape(parts, jnp.float32),
        }
    # With one token a row, num_keys bounds nothing: the token is written, or its row computes nothing.
    bounds = {} if num_keys is None or t == 1 else {"num_keys": num_keys}
    bounds |= {} if tree is None else {"tree": tree}
    results = pl.pallas_call(
        functools.partial(
            _kernel, names=(*bounds, *outputs), num_tokens=t, page_size=s, window=window, scale=scale,
            soft_cap=soft_cap, splits=splits, block_rows=block_rows, block_keys=block_keys, block_d=block_d,
            device=device,
        ),
        grid=(row_blocks * splits, g, b),
        out_shape=list(outputs.values()),
        compiler_params=plgpu.CompilerParams(
            num_warps=4, num_stages=num_stages(roomy and splits == 1, 2 * block_keys * block_d * pages.dtype.itemsize)
        ),
        interpret=device.interpret,
        name="paged_attention",
    )(query.reshape(b, t * h, d), pages.reshape(p * s, g2, d), block_table, kv_len, *bounds.values())  # fmt: skip
    if splits == 1:
        return results[0].reshape(query.shape)
    acc, top, total = results
    return combined(acc, top, total, axis=0).reshape(query.shape).astype(query.dtype)


def combined(acc, top, total, axis):
    """Return the result of all splits, which are this axis of acc [..., D], top and total [...]."""
    shrink = jnp.exp2(top - jnp.max(top, axis=axis, keepdims=True))
    total = jnp.sum(total * shrink, axis=axis)
    return jnp.sum(acc * shrink[..., None], axis=axis) / jnp.where(total > 0, total, 1)[..., None]


def initial_carry(rows, columns, parts, keys=()):
    """Return the carry of `attend` before the first key: (largest score, total weight, *parts of the weighted sum).

    keys: (block_keys,) to keep a total weight for each key of a block, which the caller adds up at the end. This takes
    some registers, and saves a sum over threads in each step.
    """
    sums = [jnp.zeros((rows, columns), jnp.float32)] * parts
    return jnp.full(rows, LEAST, jnp.float32), jnp.zeros((rows, *keys), jnp.float32), *sums


def attend(carry, query, key, value, seen, *, scale, soft_cap):
    """Return the carry after a block of keys and values; query, key and value are lists of column parts of the head.

    seen: bool[rows, keys], broadcastable: which keys each query sees.
    """
    top, total, *acc = carry
    dtype = value[0].dtype
    dot = functools.partial(plgpu.dot, precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None)
    scores = added(dot(q, k, trans_b=True) for q, k in zip(query, key, strict=True))
    if soft_cap is None:
        scores *= scale * LOG2E
    else:
        scores = soft_cap * LOG2E * jnp.tanh(scores * (scale / soft_cap))
    scores = jnp.where(seen, scores, MASKED)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    weights, shrink = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
    total = total * shrink + jnp.sum(weights, axis=1) if total.ndim == 1 else total * shrink[:, None] + weights
    weights = weights.astype(dtype)
    return new_top, total, *(a * shrink[:, None] + dot(weights, v) for a, v in zip(acc, value, strict=True))


def attend_to_pages(
    query, query_at, pages, block_table, place, keys, *,
    columns, page_size, block_keys, whole, window, scale, soft_cap, ahead=None, tree=None,
):  # fmt: skip
    """Return the carry of `attend` after the keys of one row and key-value head that the queries see.

    Args:
      query: column parts of the queries; or a function that returns (query, carry before the first key). The first step
        calls the function while the first keys are being read.
      query_at: i32[rows], positions of the queries.
      pages: [P * S, 2G, D].
      place: (row, key-value head).
      keys: (begin, end) of the positions to read.
      columns: column indices of the head, in parts.
      whole: whether these are all keys of the row; the total weight then has a value for each key (see `result`).
      ahead: function of `now` that prefetches for the next kernel and returns 0 (see `_overlap.prefetch`), or None.
      tree: (position of the first node i32[rows], words as a list of i32[rows]) of the queries, or None.
    """
    num_slots, _, d = pages.shape
    row_pages = block_table.shape[1]
    b, head = place
    begin, end = keys
    last_key = jnp.minimum(query_at, end - 1)  # that each query sees among these
    # A program that takes all keys is alone on its multiprocessor, so it has registers to spare.
    start = initial_carry(query_at.size, columns[0].size, len(columns), (block_keys,) if whole else ())
    first = None
    num_steps = pl.cdiv(jnp.maximum(end - begin, 0), block_keys)
    if callable(query):
        first = query
        query = [jnp.zeros((query_at.size, c.size), pages.dtype) for c in columns]
        num_steps = STEPS + jnp.clip(num_steps - STEPS, 0, row_pages * page_size)  # bounds known to the compiler

    def step(i, state):
        *before, prefetched = state
        query, carry = before if first is None else lax.cond(i == 0, first, lambda: tuple(before))
        if ahead is not None:
            prefetched += ahead(now=i == num_steps - 1)
        key_at = begin + i * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
        used = key_at < end
        # Unused keys are not replaced by key 0: that takes registers, and so one program less fits a multiprocessor.
        page = plgpu.load(block_table.at[b, jnp.minimum(lax.div(key_at, page_size), row_pages - 1)])
        page = jnp.minimum(page, num_slots // page_size - 1)
        slot = page * page_size + lax.rem(key_at, page_size)

        def load(part):
            at = slot[:, None], 2 * head + part
            return [plgpu.load(pages.at[*at, c[None, :]], mask=tile(used, c, d), other=0) for c in columns]

        if tree is None:
            visible = key_at[None, :] <= last_key[:, None]
        else:
            first_node, words = tree
            visible = sees([word[:, None] for word in words], key_at[None, :] - first_node[:, None]) & used[None, :]
        if window is not None:
            visible &= key_at[None, :] > query_at[:, None] - window
        return query, attend(carry, query, load(0), load(1), visible, scale=scale, soft_cap=soft_cap), prefetched

    _, (top, total, *acc), prefetched = lax.fori_loop(0, num_steps, step, (query, start, jnp.int32(0)))
    return top, total if ahead is None else total + prefetched.astype(jnp.float32), *acc


def result(carry, device):
    """Return the result of the queries, in column parts, after all keys. Allow the next kernel to start."""
    _, total, *acc = carry
    total = start_next(jnp.sum(total, axis=1), device)
    return [a / jnp.where(total > 0, total, 1)[:, None] for a in acc]


def tile(rows, columns, head_dim):
    """Return the mask of a tile: these rows, and the columns that are not padding of the head size."""
    mask = jnp.broadcast_to(rows[:, None], (rows.shape[0], columns.shape[0]))
    return mask if head_dim % columns.shape[0] == 0 else mask & (columns < head_dim)[None, :]


def _kernel(
    query, pages, block_table, kv_len, *refs, names,
    num_tokens, page_size, window, scale, soft_cap, splits, block_rows, block_keys, block_d, device,
):  # fmt: skip
    out = dict(zip(names, refs, strict=True))
    (_, g2, d), row_pages = pages.shape, block_table.shape[1]
    h = query.shape[1] // num_tokens
    group = h // (g2 // 2)
    row_block, split = lax.div(pl.program_id(0), splits), lax.rem(pl.program_id(0), splits)
    head, b = pl.program_id(1), pl.program_id(2)

    first_row = row_block * block_rows
    row = first_row + jnp.arange(block_rows, dtype=jnp.int32)
    token = lax.div(row, group)
    # The index in query and output, [B, T * H]; out of bounds where not `here`.
    line = token * h + head * group + lax.rem(row, group)
    here = token < num_tokens
    # Heads are read in halves: a thread then has fewer rows of a tile, and looks up fewer pages.
    half = block_d // 2 if block_d >= 32 else block_d
    parts = [first + jnp.arange(half, dtype=jnp.int32) for first in range(0, block_d, half)]

    q = [plgpu.load(query.at[b, line[:, None], at[None, :]], mask=tile(here, at, d), other=0) for at in parts]

    # The query block reads keys [begin, end); this program reads [split_begin, split_end) of them.
    position = kv_len[b] - num_tokens  # of the row's first query
    query_at = position + token
    first_at = position + first_row // group  # no query has a lower position
    tree = None
    if "tree" in out:

        def of_token(i):
            return plgpu.load(out["tree"].at[b, token, jnp.full(token.shape, i, jnp.int32)], mask=here, other=0)

        query_at = of_token(POSITION)
        first_at = plgpu.load(out["tree"].at[b, jnp.int32(0), jnp.int32(FIRST_NODE)])
        tree = of_token(FIRST_NODE), [of_token(i) for i in range(WORDS, out["tree"].shape[2])]
    last_query = position + jnp.minimum((first_row + block_rows - 1) // group, num_tokens - 1)
    if tree is not None:  # nodes see each other across the programs of a row
        last_query = kv_len[b] - 1
    begin = 0 if window is None else jnp.maximum(first_at - window + 1, 0)
    end = jnp.clip(last_query + 1, 0, row_pages * page_size)
    if "num_keys" in out:
        end = jnp.minimum(end, out["num_keys"][b])
    split_keys = pl.cdiv(pl.cdiv(jnp.maximum(end - begin, 0), splits), block_keys) * block_keys
    split_begin = begin + split * split_keys
    split_end = jnp.minimum(split_begin + split_keys, end)

    carry = attend_to_pages(
        q, query_at, pages, block_table, (b, head), (split_begin, split_end), columns=parts, page_size=page_size,
        block_keys=block_keys, whole=splits == 1, window=window, scale=scale, soft_cap=soft_cap, tree=tree,
    )  # fmt: skip
    if splits == 1:
        to, first, acc = out["out"], [b], result(carry, device)
    else:
        top, total, *acc = carry
        to, first = out["acc"], [split, b]
        plgpu.store(out["top"].at[split, b, line], top, mask=here)
        plgpu.store(out["total"].at[split, b, line], total, mask=here)
    for at, values in zip(parts, acc, strict=True):
        plgpu.store(to.at[*first, line[:, None], at[None, :]], values.astype(to.dtype), mask=tile(here, at, d))
