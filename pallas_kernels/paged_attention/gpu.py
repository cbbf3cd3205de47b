"""paged_attention on GPU: flash attention over pages, the keys of a row split over several programs.

Splitting follows Flash-Decoding (crfm.stanford.edu/2023/10/12/flashdecoding.html): each program leaves its weighted
sum, its largest score and its total weight, and a small jnp epilogue combines them. Where rows and heads alone are
programs enough, and their keys few, one program has all keys of a head: nothing is left to combine, and as many copies
are under way as a multiprocessor holds. The number of splits depends on static shapes only, so a row's result does not
depend on what its neighbours are.
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
from pallas_kernels.tree import FIRST_NODE, POSITION, WORDS, sees

MIN_ROWS, MAX_ROWS = 16, 64  # query rows of a program: tl.dot wants at least 16
SPLIT_KEYS, MAX_SPLITS = 128, 16
PROGRAMS = 512  # more splits than for so many only make more to combine
WHOLE_PROGRAMS = 96  # one split from so many programs on, up to WHOLE_KEYS
BLOCK_BYTES = 1 << 15  # of the keys and values that are read at a time, where more than one such read is under way
MASKED = -1e30  # the score of a key that is not seen; finite: differences stay 0, not NaN
LEAST = -5e29  # the largest score before the first key: no real one is below it, and what is masked weighs nothing
STEPS = 3  # at least, where queries are computed in the first: so the first page ids need not wait for a row's length
LOG2E = math.log2(math.e)  # scores are to the base of 2


def num_splits(programs: int, keys: int, roomy: bool) -> int:
    """Of a row's keys, where programs are without splits so many, and the block table has room for so many keys.

    roomy: 7 stages fit into a multiprocessor.
    """
    if roomy and programs >= WHOLE_PROGRAMS and keys <= WHOLE_KEYS:
        return 1
    return max(1, min(pl.cdiv(keys, SPLIT_KEYS), MAX_SPLITS, PROGRAMS // programs))


def most_rows(block_d: int, dtype, roomy: bool) -> int:
    """Query rows of a program whose numbers fit into its registers. Of float32 each product holds several parts; matrix
    units that read from shared memory (see `num_splits`) leave room for more."""
    if dtype.itemsize > 2:
        return MIN_ROWS
    return MAX_ROWS if block_d <= (128 if roomy else 64) else MAX_ROWS // 2


def keys_at_a_time(block_d: int, dtype) -> int:
    """Keys that are read at a time: with their values they stay within shared memory."""
    return 64 if block_d * dtype.itemsize <= 512 else 32


def num_stages(deep: bool, block_bytes: int) -> int:
    """A block's page ids are read before its keys and values, so that two stages are one read ahead."""
    if block_bytes > BLOCK_BYTES:
        return 2
    return 7 if deep else 3


def paged_attention(query, pages, block_table, kv_len, num_keys=None, tree=None, *, scale, window, soft_cap, device):
    (b, t, h, d), (p, s, g2, _), n = query.shape, pages.shape, block_table.shape[1]
    g = g2 // 2
    rows, block_d = t * h // g, max(pl.next_power_of_2(d), 16)
    roomy = device.shares_much
    block_rows = min(max(pl.next_power_of_2(rows), MIN_ROWS), most_rows(block_d, pages.dtype, roomy))
    row_blocks = pl.cdiv(rows, block_rows)
    splits = num_splits(b * g * row_blocks, n * s, roomy)
    block_keys = keys_at_a_time(block_d, pages.dtype)
    shape = jax.ShapeDtypeStruct
    if splits == 1:
        outputs = {"out": shape((b, t * h, d), query.dtype)}
    else:
        partial = lambda *size: shape((splits, b, t * h, *size), jnp.float32)
        outputs = {"acc": partial(d), "top": partial(), "total": partial()}
    # A single token is written, or its row computes nothing.
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
    """The result of all splits, which lie along this axis of acc [..., D], top and total [...]."""
    shrink = jnp.exp2(top - jnp.max(top, axis=axis, keepdims=True))
    total = jnp.sum(total * shrink, axis=axis)
    return jnp.sum(acc * shrink[..., None], axis=axis) / jnp.where(total > 0, total, 1)[..., None]


def nothing(rows, columns, parts, keys=()):
    """The carry of `attend` before the first key: the largest score, the total weight, the weighted sum in parts.

    keys: (block_keys,) for the total weight of each place of a block, which the caller adds up at the end: for some
    registers, a sum over threads less in each step.
    """
    sums = [jnp.zeros((rows, columns), jnp.float32)] * parts
    return jnp.full(rows, LEAST, jnp.float32), jnp.zeros((rows, *keys), jnp.float32), *sums


def attend(carry, query, key, value, seen, *, scale, soft_cap):
    """carry after some more keys and values, as far as they are seen, [rows, keys]; all heads in the same parts."""
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
    """The carry of `attend` after keys [begin, end) of a row and a key-value head, (b, head), as far as they are seen.

    query: in parts; or a function that gives (query, carry before the first key) in the first step, while the first
    keys are under way. query_at i32[rows]: where the queries stand; pages [P * S, 2G, D]; columns: of the head, in
    parts; whole: these are all keys (see `result`). ahead: asks for what the next kernel reads, given whether to do it
    now, and gives 0 (see `_overlap.ask_for`). tree: (first node i32[rows], words, a list of i32[rows]) of the queries,
    or None.
    """
    (num_slots, _, d), row_pages, (b, head), (begin, end) = pages.shape, block_table.shape[1], place, keys
    last_key = jnp.minimum(query_at, end - 1)  # that a query sees here
    # A program that has all keys is alone on its multiprocessor: it has registers to spare.
    start = nothing(query_at.size, columns[0].size, len(columns), (block_keys,) if whole else ())
    first, num_steps = None, pl.cdiv(jnp.maximum(end - begin, 0), block_keys)
    if callable(query):
        first, query = query, [jnp.zeros((query_at.size, c.size), pages.dtype) for c in columns]
        num_steps = STEPS + jnp.clip(num_steps - STEPS, 0, row_pages * page_size)  # bounds that the compiler sees

    def step(i, state):
        *before, asked = state
        query, carry = before if first is None else lax.cond(i == 0, first, lambda: tuple(before))
        if ahead is not None:
            asked += ahead(now=i == num_steps - 1)
        key_at = begin + i * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
        used = key_at < end
        # To take key 0 for those not used would cost registers, and so a program a multiprocessor.
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
        return query, attend(carry, query, load(0), load(1), visible, scale=scale, soft_cap=soft_cap), asked

    _, (top, total, *acc), asked = lax.fori_loop(0, num_steps, step, (query, start, jnp.int32(0)))
    return top, total if ahead is None else total + asked.astype(jnp.float32), *acc


def result(carry, device):
    """What the queries get, in parts, after all keys. The next kernel is asked for."""
    _, total, *acc = carry
    total = start_next(jnp.sum(total, axis=1), device)
    return [a / jnp.where(total > 0, total, 1)[:, None] for a in acc]


def tile(rows, columns, head_dim):
    """The mask of a tile: these rows, and the columns that no padding of the head size made."""
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
    line = (
        token * h + head * group + lax.rem(row, group)
    )  # in query and output: [B, T * H]; beyond them where not `here`
    here = token < num_tokens
    # Heads in halves: fewer rows of a tile are a thread's, so that it looks up fewer pages.
    half = block_d // 2 if block_d >= 32 else block_d
    parts = [first + jnp.arange(half, dtype=jnp.int32) for first in range(0, block_d, half)]

    q = [plgpu.load(query.at[b, line[:, None], at[None, :]], mask=tile(here, at, d), other=0) for at in parts]

    # The block reads keys [begin, end), this program [split_begin, split_end) of them.
    position = kv_len[b] - num_tokens  # of the row's first query
    query_at, first_at, tree = position + token, position + first_row // group, None  # no query stands before first_at
    if "tree" in out:
        of_token = lambda i: plgpu.load(
            out["tree"].at[b, token, jnp.full(token.shape, i, jnp.int32)], mask=here, other=0
        )
        query_at, first_at = of_token(POSITION), plgpu.load(out["tree"].at[b, jnp.int32(0), jnp.int32(FIRST_NODE)])
        tree = of_token(FIRST_NODE), [of_token(i) for i in range(WORDS, out["tree"].shape[2])]
    last_query = position + jnp.minimum((first_row + block_rows - 1) // group, num_tokens - 1)
    if tree is not None:  # nodes of a block see each other, also those that other programs have
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
    for at, numbers in zip(parts, acc, strict=True):
        plgpu.store(to.at[*first, line[:, None], at[None, :]], numbers.astype(to.dtype), mask=tile(here, at, d))
