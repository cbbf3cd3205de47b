"""On GPU, all that follows a layer's product qkv: biases, norms, rotary embedding, cache write, attention over pages.

A program has all keys of a row and a key-value head, so that nobody else needs what is new of that head: its queries,
keys and values are rows of one tile, which `heads` would leave to a kernel of their own. The first keys of earlier
tokens are asked into the L2 cache meanwhile.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import _device
from pallas_kernels.paged_attention.gpu import MIN_ROWS, attend_to_pages, keys_at_a_time, num_splits, num_stages, result
from pallas_kernels.self_attention.heads import halves, leave_queries, new_rows, num_queries, start_reading


def covers(num_tokens, parts, pages, block_table, interpret=False) -> bool:
    """Where a program has all keys, and all that is new in as many rows as queries alone would take."""
    (_, s, g2, _), (b, n) = pages.shape, block_table.shape
    roomy = interpret or _device.shares_much()
    one = roomy and num_splits(b * g2 // 2, n * s, roomy) == 1
    return one and num_tokens * (num_queries(parts, pages) + 2) <= MIN_ROWS


def attention(
    parts, bias, q_norm, k_norm, pages, slots, block_table, kv_len, cos, sin, *,
    eps, scale, window, soft_cap, interpret=False,
):  # fmt: skip
    """parts [splits, M, (H + 2G) * D] of the product, for M tokens -> mixed [M, H * D], and pages with what is new.

    The others as in `self_attention`, cos and sin f32[M, D / 2].
    """
    (p, s, g2, d), (_, m, width), b = pages.shape, parts.shape, len(kv_len)
    operands = {"parts": parts, "bias": bias, "q_norm": q_norm, "k_norm": k_norm, "slots": slots, "cos": cos}
    operands |= {"sin": sin, "block_table": block_table, "kv_len": kv_len}
    operands |= {"first_page": block_table[:, :, None], "first_slot": pages.reshape(p * s, g2, d)}
    operands = {name: value for name, value in operands.items() if value is not None}
    outputs = {"mixed": (m, width - g2 * d), "pages": (p * s, g2, d)}
    block_keys = keys_at_a_time(d, pages.dtype)
    pointers = ("first_page", "first_slot")  # of which the kernel only wants to know where they are
    whole = lambda shape: pl.BlockSpec(shape, lambda *_: (0,) * len(shape))
    mixed, new_pages = pl.pallas_call(
        functools.partial(
            _kernel, names=(*operands, *outputs), num_tokens=m // b, page_size=s, block_keys=block_keys, eps=eps,
            window=window, scale=scale, soft_cap=soft_cap, interpret=interpret,
        ),
        grid=(g2 // 2, b),
        in_specs=[whole((1, 1, 1) if name in pointers else value.shape) for name, value in operands.items()],
        out_specs=[whole(shape) for shape in outputs.values()],
        out_shape=[jax.ShapeDtypeStruct(shape, pages.dtype) for shape in outputs.values()],
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=plgpu.CompilerParams(
            num_warps=4, num_stages=num_stages(True, 2 * block_keys * d * pages.dtype.itemsize)
        ),
        interpret=interpret,
        name="attention",
    )(*operands.values())  # fmt: skip
    return mixed, new_pages.reshape(pages.shape)


def _kernel(*refs, names, num_tokens, page_size, block_keys, eps, window, scale, soft_cap, interpret):
    ref = dict(zip(names, refs, strict=True))
    pages, block_table = ref["pages"], ref["block_table"]
    d, row_pages, group = pages.shape[2], block_table.shape[1], num_queries(ref["parts"], pages)
    head, b = pl.program_id(0), pl.program_id(1)

    row = jnp.arange(MIN_ROWS, dtype=jnp.int32)
    token = lax.div(row, group + 2)  # of this row of the batch
    rows = head, b * num_tokens + token, lax.rem(row, group + 2), token < num_tokens
    position = ref["kv_len"][b] - num_tokens  # of the first query
    begin = 0 if window is None else jnp.maximum(position - window + 1, 0)
    end = jnp.clip(position + num_tokens, 0, row_pages * page_size)

    read = start_reading(ref, *rows)
    if not interpret:
        end += ask_for_keys(ref, begin, end, page_size=page_size)
    new = new_rows(ref, read, *rows, eps=eps)
    if not interpret:  # the new keys and values are out before they are read with the others
        plgpu.debug_barrier()
    carry = attend_to_pages(
        new, position + token, pages, block_table, (b, head), (begin, end), columns=halves(d), page_size=page_size,
        block_keys=block_keys, whole=True, window=window, scale=scale, soft_cap=soft_cap,
    )  # fmt: skip
    leave_queries(ref["mixed"], result(carry, interpret), group, *rows)


def ask_for_keys(ref, begin, end, *, page_size):
    """0, when each thread has asked for a key and its value, of the row's first as many as there are threads.

    It looks up the page before it knows whether there is such a key: so it need not wait for the row's length first.
    """
    (num_slots, g2, d), row_pages, size = ref["pages"].shape, ref["block_table"].shape[1], ref["pages"].dtype.itemsize
    lines = range(0, 2 * d * size, 128)  # of memory: a head's value lies behind its key
    code = (
        "{ .reg .pred used; .reg .b32 key, page, slot; .reg .b64 at;",
        "mov.u32 key, %tid.x; add.s32 key, key, $3;",
        f"div.s32 page, key, {page_size}; min.s32 page, page, {row_pages - 1};",  # its place in the row's table
        f"mad.lo.s32 page, $5, {row_pages}, page; mad.wide.s32 at, page, 4, $1;",
        f"ld.global.b32 page, [at]; min.s32 page, page, {num_slots // page_size - 1};",
        f"rem.s32 slot, key, {page_size}; mad.lo.s32 slot, page, {page_size}, slot;",
        f"mad.wide.s32 at, slot, {g2 * d * size}, $2; mad.wide.s32 at, $6, {2 * d * size}, at;",
        "setp.lt.s32 used, key, $4;",
        *(f"@used prefetch.global.L2 [at + {first}];" for first in lines),
        "mov.b32 $0, 0; }",
    )
    numbers = begin, end, pl.program_id(1), pl.program_id(0)
    (zero,) = plgpu.elementwise_inline_asm(
        "\n".join(code),
        args=[ref["first_page"], ref["first_slot"], *(jnp.full((1, 1, 1), n, jnp.int32) for n in numbers)],
        constraints="=r,l,l,r,r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1, 1, 1), jnp.int32)],
    )
    return jnp.sum(zero)
