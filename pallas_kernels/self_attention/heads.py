"""On GPU, between the product of a layer's first half and its attention: biases, norms, rotary embedding, cache write.

A program has one head of one token. All that it reads is under way before the first of it is waited for.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._split_product import added


def heads(parts, bias, q_norm, k_norm, pages, slots, cos, sin, *, eps, interpret=False):
    """parts [splits, M, (H + 2G) * D] of the product, for M tokens -> queries [M, H * D], and pages with what is new.

    The others as in `self_attention`, cos and sin f32[M, D / 2].
    """
    (p, s, g2, d), (_, m, width) = pages.shape, parts.shape
    g = g2 // 2
    group = width // (g * d) - 2
    operands = {"parts": parts, "bias": bias, "q_norm": q_norm, "k_norm": k_norm, "slots": slots}
    operands = {name: value for name, value in (operands | {"cos": cos, "sin": sin}).items() if value is not None}
    outputs = {"queries": (m, g * group * d), "pages": (p * s, g2, d)}
    queries, new_pages = pl.pallas_call(
        functools.partial(_kernel, names=(*operands, "old_pages", *outputs), eps=eps),
        grid=(group + 2, g, m),
        out_shape=[jax.ShapeDtypeStruct(shape, pages.dtype) for shape in outputs.values()],
        input_output_aliases={len(operands): 1},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="heads",
    )(*operands.values(), pages.reshape(outputs["pages"]))
    return queries, new_pages.reshape(pages.shape)


def _kernel(*refs, names, eps):
    ref = dict(zip(names, refs, strict=True))
    parts, queries, pages = ref["parts"], ref["queries"], ref["pages"]
    num_slots, g2, d = pages.shape
    part, head, m = pl.program_id(0), pl.program_id(1), pl.program_id(2)  # part: a query, the key or the value
    group = parts.shape[2] // (g2 // 2 * d) - 2
    low = jnp.arange(d // 2, dtype=jnp.int32)
    halves = low, low + d // 2
    first = (head * (group + 2) + part) * d
    load = lambda name, *at: plgpu.load(ref[name].at[at]).astype(jnp.float32)

    slot = ref["slots"][m]
    cos, sin = load("cos", m, low), load("sin", m, low)
    scales = {name: [load(name, at) for at in halves] for name in ("q_norm", "k_norm") if name in ref}
    x = [added(load("parts", jnp.int32(i), m, first + at) for i in range(parts.shape[0])) for at in halves]
    if "bias" in ref:
        x = [a + load("bias", first + at) for a, at in zip(x, halves, strict=True)]
    shrink = lax.rsqrt((jnp.sum(x[0] * x[0]) + jnp.sum(x[1] * x[1])) / d + eps)
    a, b = x
    for name, mine in (("q_norm", part < group), ("k_norm", part == group)):
        if name in ref:
            normed = [(h * shrink * scale).astype(queries.dtype) for h, scale in zip(x, scales[name], strict=True)]
            a, b = (jnp.where(mine, new.astype(jnp.float32), old) for new, old in zip(normed, (a, b), strict=True))
    turned = a * cos - b * sin, b * cos + a * sin
    result = [jnp.where(part <= group, new, old).astype(queries.dtype) for new, old in zip(turned, x, strict=True)]

    @pl.when(part < group)
    def _query():
        for at, numbers in zip(halves, result, strict=True):
            plgpu.store(queries.at[m, (head * group + part) * d + at], numbers)

    @pl.when((part >= group) & (slot >= 0) & (slot < num_slots))
    def _key_or_value():
        for at, numbers in zip(halves, result, strict=True):
            plgpu.store(pages.at[slot, 2 * head + part - group, at], numbers)
