"""The op paged_attention on GPU: flash attention over pages, with a row's keys split over several programs.

A program is a block of the kernel's grid. The split follows Flash-Decoding
(crfm.stanford.edu/2023/10/12/flashdecoding.html). Each program writes the weighted sum of its values, its largest score
and its total softmax weight. A second kernel combines these. If rows and heads alone give enough
programs, and the keys are few, one program reads all keys of a row and head. Then nothing is left to combine, and as
many reads are in flight as a multiprocessor has room for.

The number of splits depends on static shapes only, so that a row's result does not depend on the length of other rows.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._combine_splits import combined
from pallas_kernels._overlap import start_next
from pallas_kernels._split_product import added
from pallas_kernels._types import Carry, Ref
from pallas_kernels.device import Device
from pallas_kernels.paged_attention import WHOLE_KEYS, words_of_pages
from pallas_kernels.pages import AnyPages, ScaledPages
from pallas_kernels.tree_mask import FIRST_NODE, POSITION, WORDS, sees
from pallas_kernels.weights import Prepared

MIN_ROWS, MAX_ROWS = 16, 64  # least and largest number of query rows of a program; Triton's dot needs at least 16
SPLIT_KEYS, MAX_SPLITS = 128, 16  # least number of a full row's keys in a split; largest number of splits of a row
PROGRAMS = 512  # largest number of programs after splitting; more splits would only add work to combine them
WHOLE_PROGRAMS = 96  # least number of programs without splits for which a row's keys (up to WHOLE_KEYS) stay whole
MAX_HEAD = 256  # largest head size; larger heads use plain jnp
BLOCK_BYTES = 1 << 15  # largest number of bytes of keys and values in a block if there are more than two stages
MASKED = -1e30  # the score of an unseen key; it is finite, so that a difference of two is 0, not NaN
LEAST = -5e29  # "largest score" before any key: below all real scores, so far above MASKED that unseen keys weigh 0
STEPS = 3  # least number of steps of a loop over keys that computes its queries in step 0; see `attend_to_pages`
LOG2E = math.log2(math.e)  # factor of scores, since softmax weights are computed as powers of 2


def num_splits(programs: int, keys: int, roomy: bool) -> int:
    """Return the number of programs over which the keys of a row are split.

    Args:
      programs: number of programs if keys are not split.
      keys: number of keys that a row of the block table has room for.
      roomy: whether 7 pipeline stages fit into the shared memory of a multiprocessor.
    """
    if roomy and programs >= WHOLE_PROGRAMS and keys <= WHOLE_KEYS:
        return 1
    return max(1, min(pl.cdiv(keys, SPLIT_KEYS), MAX_SPLITS, PROGRAMS // programs))


def most_rows(block_d: int, dtype: np.dtype[Any], roomy: bool) -> int:
    """Return the largest number of query rows for which a program's registers suffice.

    A float32 product holds each value in several parts. Matrix units that read from shared memory leave room for more
    rows.

    block_d: size of a head, padded to a power of two.
    dtype: dtype of keys and values.
    roomy: whether shared memory is large (see `num_splits`), which implies such matrix units.
    """
    if dtype.itemsize > 2:
        return MIN_ROWS
    return MAX_ROWS if block_d <= (128 if roomy else 64) else MAX_ROWS // 2


def keys_at_a_time(block_d: int, dtype: np.dtype[Any]) -> int:
    """Return the number of keys that are read at a time, such that keys and values fit into shared memory.

    block_d: size of a head, padded to a power of two.
    """
    return 64 if block_d * dtype.itemsize <= 512 else 32


def num_stages(deep: bool, block_bytes: int, in_words: bool = False) -> int:
    """Return the number of pipeline stages of the loop over blocks of keys.

    The page ids of a block are read before the block's keys and values. So n stages, 3, 5 or 7, read (n - 1) / 2 blocks
    ahead.

    deep: whether to use 7 stages, for which shared memory must have room.
    block_bytes: bytes of keys and values of a block.
    in_words: whether the pages are in 8 bits and read as words. A block of them takes half of the memory that it takes
      in bfloat16, so two blocks are read ahead instead of one.
    """
    if block_bytes > BLOCK_BYTES:
        return 2
    return 7 if deep else 5 if in_words else 3


def fits(query: jax.Array, pages: AnyPages, *_: Any, device: Device, **options: Any) -> bool:
    """Return whether the kernel supports these arguments.

    Registers and shared memory suffice for heads of 256. Triton has e4m3 on GPUs from compute capability 8.9 on.
    """
    has_dtype = device.interpret or pages.dtype != jnp.float8_e4m3fn or device.reaches(8, 9)
    return pages.shape[-1] <= MAX_HEAD and has_dtype


def paged_attention(
    query: jax.Array,
    pages: AnyPages,
    block_table: jax.Array,
    kv_len: jax.Array,
    num_keys: jax.Array | None = None,
    tree: jax.Array | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    summed: bool = False,
    device: Device,
) -> Any:
    """Compute the op paged_attention in one kernel, and combine the splits of each row if there are several.

    summed: whether to return a `Prepared` of [B, T, H * D] with sums if splits are combined.
    """
    b, t, h, d = query.shape
    p, s, g2, _ = pages.shape
    n = block_table.shape[1]
    g = g2 // 2
    rows = t * h // g
    block_d = max(pl.next_power_of_2(d), 16)
    roomy = device.shares_much
    dtype = query.dtype if isinstance(pages, ScaledPages) else pages.dtype  # dtype of products
    block_rows = min(max(pl.next_power_of_2(rows), MIN_ROWS), most_rows(block_d, dtype, roomy))
    row_blocks = pl.cdiv(rows, block_rows)
    splits = num_splits(b * g * row_blocks, n * s, roomy)
    block_keys = keys_at_a_time(block_d, dtype)
    shape: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
    if splits == 1:
        outputs = {"out": shape((b, t * h, d), query.dtype)}
    else:
        parts = splits, b, t * h
        outputs = {
            "acc": shape((*parts, d), jnp.float32),
            "top": shape(parts, jnp.float32),
            "total": shape(parts, jnp.float32),
        }
    # If rows have one token, num_keys has no effect: either that token is written, or its row computes nothing.
    bounds = {} if num_keys is None or t == 1 else {"num_keys": num_keys}
    bounds |= {} if tree is None else {"tree": tree}
    bounds |= {"scales": pages.by_head()} if isinstance(pages, ScaledPages) else {}
    stored = (pages.values if isinstance(pages, ScaledPages) else pages).reshape(p * s, g2, d)
    # Converted words are in registers. With MAX_ROWS query rows, as in prefill, a Hopper GPU's matrix units read keys
    # and values from shared memory.
    in_words = block_rows < MAX_ROWS and words_of_pages.can_be_read(pages, query.dtype, device)
    stored = words_of_pages.words(stored) if in_words else stored
    results = pl.pallas_call(
        functools.partial(
            _kernel, names=(*bounds, *outputs), num_tokens=t, page_size=s, window=window, scale=scale,
            soft_cap=soft_cap, splits=splits, block_rows=block_rows, block_keys=block_keys, block_d=block_d,
            of_words=(pages.dtype, device) if in_words else None, device=device,
        ),
        grid=(row_blocks * splits, g, b),
        out_shape=list(outputs.values()),
        compiler_params=plgpu.CompilerParams(
            num_warps=4,
            num_stages=num_stages(roomy and splits == 1, 2 * block_keys * block_d * pages.dtype.itemsize, in_words),
        ),
        interpret=device.interpret,
        name="paged_attention",
    )(query.reshape(b, t * h, d), stored, block_table, kv_len, *bounds.values())  # fmt: skip
    if splits == 1:
        result: jax.Array = results[0]
        return result.reshape(query.shape)
    result, sums = combined(*results, axis=0, dtype=query.dtype, heads=h if summed else 0, device=device)
    return result.reshape(query.shape) if sums is None else prepared(result, sums, b)


def prepared(rows: jax.Array, sums: jax.Array, b: int) -> Prepared:
    """Return the results of `combined` for b rows of a batch as the next product reads them, [B, T, H * D]."""
    return Prepared(rows.reshape(b, len(sums) // b, -1), sums.reshape(b, len(sums) // b, -1))


def initial_carry(rows: int, columns: int, parts: int, keys: tuple[int, ...] = ()) -> Carry:
    """Return the state of the running softmax (`Carry`) before the first key.

    The state is (largest score, total weight, *parts of the weighted sum of values).

    rows: number of query rows.
    columns, parts: number of columns of a part of the weighted sum, and number of parts.
    keys: (block_keys,) for a total weight of each key index within a block, which the caller adds up at the end. This
      takes some registers, and saves a sum over threads in each step. () for one total weight.
    """
    sums = [jnp.zeros((rows, columns), jnp.float32)] * parts
    return jnp.full(rows, LEAST, jnp.float32), jnp.zeros((rows, *keys), jnp.float32), *sums


def attend(
    carry: Carry,
    query: Sequence[jax.Array],
    key: Sequence[jax.Array],
    value: Sequence[jax.Array],
    seen: jax.Array,
    *,
    scale: float | jax.Array,
    soft_cap: float | None,
    of_values: jax.Array | None = None,
) -> Carry:
    """Return the state of the running softmax (`Carry`) after one more block of keys and values.

    carry: the state before the block.
    query, key, value: [rows, _], [keys, _] and [keys, _], each as a list of parts of the head's columns.
    seen: bool[rows, keys] or broadcastable to it, whether a query sees a key.
    scale, soft_cap: as in `paged_attention`; scale may have a factor for each key, as f32[1, keys].
    of_values: factors of the values, f32[keys]; None for 1.
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
    weights = (weights if of_values is None else weights * of_values[None, :]).astype(dtype)
    return new_top, total, *(a * shrink[:, None] + dot(weights, v) for a, v in zip(acc, value, strict=True))


def attend_to_pages(
    query: Any,
    query_at: jax.Array,
    pages: Ref,
    block_table: Ref,
    place: tuple[jax.Array, jax.Array],
    keys: tuple[jax.Array | int, jax.Array],
    *,
    columns: Sequence[jax.Array],
    page_size: int,
    block_keys: int,
    whole: bool,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    ahead: Callable[..., jax.Array] | None = None,
    tree: tuple[jax.Array, list[jax.Array]] | None = None,
    scales: Ref | None = None,
    of_words: tuple[Any, Device] | None = None,
) -> Carry:
    """Return the state of the running softmax (`Carry`) after the queries have attended to keys of one row and head.

    Args:
      query: queries as a list of parts of the head's columns; or a function that returns (queries, state before the
        first key). The first step calls the function while the first keys are being read.
      query_at: i32[rows], positions of the queries.
      pages: [P * S, 2G, D], the pages with all slots on one axis.
      block_table: i32[B, N], page ids.
      place: (row, key-value head).
      keys: (begin, end) of the positions to read.
      columns: column indices of the head, as a list of parts.
      page_size: number of positions of a page.
      block_keys: number of keys read at a time.
      whole: whether this program reads all keys of the row. The total weight then has a value for each key index within
        a block, and `result` adds them up.
      window: number of positions that a query sees, as in `paged_attention`.
      scale: factor of the scores.
      soft_cap: bound on the absolute value of scores, or None.
      ahead: function ahead(now) that prefetches for the next kernel and returns 0 (see `_overlap.prefetch`), or None.
      tree: (position of the first node i32[rows], words as a list of i32[rows]) of the queries (see `tree_mask`) if the
        tokens are nodes of a tree, or None.
      scales: f32[P, 2G, S], scales of `ScaledPages`, or None.
      of_words: (dtype of the values, device) if the pages are given as words (see `words_of_pages`), else None.
    """
    num_slots, _, d = pages.shape
    row_pages = block_table.shape[1]
    b, head = place
    begin, end = keys
    last_key = jnp.minimum(query_at, end - 1)  # position of the last key in this range that each query sees
    # A program that reads all keys of a row mostly fills the shared memory of its multiprocessor, and is alone there.
    # Its spare registers hold a total weight for each key index within a block, which saves a sum over threads in
    # each step.
    start = initial_carry(query_at.size, columns[0].size, len(columns), (block_keys,) if whole else ())
    first = None
    num_steps = pl.cdiv(jnp.maximum(end - begin, 0), block_keys)
    if callable(query):
        first = query
        query = [jnp.zeros((query_at.size, c.size), pages.dtype) for c in columns]
        if whole:
            # At least STEPS, so that the first page ids are read without waiting for the row's length. The upper bound
            # is never reached; it is for the compiler.
            num_steps = STEPS + jnp.clip(num_steps - STEPS, 0, row_pages * page_size)

    def step(i: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        *before, prefetched = state
        query, carry = before if first is None else lax.cond(i == 0, first, lambda: tuple(before))
        if ahead is not None:
            prefetched += ahead(now=i == num_steps - 1)
        key_at = begin + i * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
        used = key_at < end
        # Unused keys are not replaced by key 0. That would take registers, so that fewer programs fit a multiprocessor.
        page = plgpu.load(block_table.at[b, jnp.minimum(lax.div(key_at, page_size), row_pages - 1)])
        page = jnp.minimum(page, num_slots // page_size - 1)
        slot = page * page_size + lax.rem(key_at, page_size)

        def load(part: int) -> list[jax.Array]:
            at = slot[:, None], 2 * head + part
            if of_words is not None:
                word = jnp.arange(d, dtype=jnp.int32)
                read = plgpu.load(pages.at[*at, word[None, :]], mask=tile(used, word, d), other=0)
                return words_of_pages.unpacked(read, *of_words)
            zero = 0 if jnp.issubdtype(pages.dtype, jnp.integer) else 0.0
            found = [plgpu.load(pages.at[*at, c[None, :]], mask=tile(used, c, d), other=zero) for c in columns]
            return found if scales is None else [x.astype(query[0].dtype) for x in found]

        def scales_of(part: int) -> Any:
            if scales is None:
                return None
            read = plgpu.load(scales.at[page, 2 * head + part, lax.rem(key_at, page_size)], mask=used, other=0)
            return read if of_words is None else read * words_of_pages.divisor(of_words[0])

        if tree is None:
            visible = key_at[None, :] <= last_key[:, None]
        else:
            first_node, words = tree
            visible = sees([word[:, None] for word in words], key_at[None, :] - first_node[:, None]) & used[None, :]
        if window is not None:
            visible &= key_at[None, :] > query_at[:, None] - window
        of_keys, of_values = scales_of(0), scales_of(1)
        factor = scale if of_keys is None else scale * of_keys[None, :]
        options = {"scale": factor, "soft_cap": soft_cap, "of_values": of_values}
        return query, attend(carry, query, load(0), load(1), visible, **options), prefetched

    _, (top, total, *acc), prefetched = lax.fori_loop(0, num_steps, step, (query, start, jnp.int32(0)))
    return top, total if ahead is None else total + prefetched.astype(jnp.float32), *acc


def result(carry: Carry, device: Device) -> list[jax.Array]:
    """Return the attention's result in parts of the head's columns, given the softmax state after all keys.

    Also allow the next kernel to start (see `_overlap.start_next`).
    """
    _, total, *acc = carry
    total = start_next(jnp.sum(total, axis=1), device)
    return [a / jnp.where(total > 0, total, 1)[:, None] for a in acc]


def tile(rows: jax.Array, columns: jax.Array, head_dim: int) -> jax.Array:
    """Return the mask bool[rows, columns] of a tile of a head.

    rows: bool[rows], whether a row is in use.
    columns: column indices of the tile; those of head_dim or more are padding and masked out.
    """
    mask = jnp.broadcast_to(rows[:, None], (rows.shape[0], columns.shape[0]))
    return mask if head_dim % columns.shape[0] == 0 else mask & (columns < head_dim)[None, :]


def _kernel(
    query: Ref,
    pages: Ref,
    block_table: Ref,
    kv_len: Ref,
    *refs: Ref,
    names: tuple[str, ...],
    num_tokens: int,
    page_size: int,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    splits: int,
    block_rows: int,
    block_keys: int,
    block_d: int,
    of_words: tuple[Any, Device] | None,
    device: Device,
) -> None:
    out = dict(zip(names, refs, strict=True))
    g2, d, row_pages = pages.shape[1], query.shape[2], block_table.shape[1]
    h = query.shape[1] // num_tokens
    group = h // (g2 // 2)
    row_block, split = lax.div(pl.program_id(0), splits), lax.rem(pl.program_id(0), splits)
    head, b = pl.program_id(1), pl.program_id(2)

    first_row = row_block * block_rows
    row = first_row + jnp.arange(block_rows, dtype=jnp.int32)
    token = lax.div(row, group)
    # Index of each query row on the axis T * H of query and output; out of bounds for rows that are not `here`.
    line = token * h + head * group + lax.rem(row, group)
    here = token < num_tokens
    # Heads are read in two halves: a thread then has fewer rows of a tile, and looks up fewer page ids.
    half = block_d // 2 if block_d >= 32 else block_d
    parts = [first + jnp.arange(half, dtype=jnp.int32) for first in range(0, block_d, half)]
    if of_words is not None:
        parts = words_of_pages.columns(d)

    q = [plgpu.load(query.at[b, line[:, None], at[None, :]], mask=tile(here, at, d), other=0) for at in parts]

    # The programs of this block of queries read keys [begin, end); this program reads [split_begin, split_end) of them.
    position = kv_len[b] - num_tokens  # position of the row's first query
    query_at = position + token
    first_at = position + first_row // group  # lower bound of the positions of this block's queries
    tree = None
    if "tree" in out:

        def of_token(i: int) -> jax.Array:
            return plgpu.load(out["tree"].at[b, token, jnp.full(token.shape, i, jnp.int32)], mask=here, other=0)

        query_at = of_token(POSITION)
        first_at = plgpu.load(out["tree"].at[b, jnp.int32(0), jnp.int32(FIRST_NODE)])
        tree = of_token(FIRST_NODE), [of_token(i) for i in range(WORDS, out["tree"].shape[2])]
    last_query = position + jnp.minimum((first_row + block_rows - 1) // group, num_tokens - 1)
    if tree is not None:  # nodes may see nodes whose queries are in other programs, so all nodes' keys are read
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
        scales=out.get("scales"), of_words=of_words,
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
