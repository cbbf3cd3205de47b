"""Every op in the form that is best known for a GPU, at the shapes of public models: a program a model and a pass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.bench.presets import preset
from jaxspec.loading.weights import compute_dtype
from jaxspec.models.config import ModelConfig
from pallas_kernels import (
    argmax_token,
    feed_forward,
    kv_write,
    merge_tokens,
    paged_attention,
    self_attention,
    slot_mapping,
)
from pallas_kernels.device import Device
from pallas_kernels.pages import zeros
from pallas_kernels.weights.grouped import BLOCKS, abstract, in_four_bits
from pallas_kernels.weights.interleaved_grouped import interleaved
from tests.nvidia.compile import compile
from tests.nvidia.gpus import GPUS
from tests.support.compilation_cache import no_compilation_cache

# Name -> (its shape, its dtype where it is not the GPU's best, that of its pages). Heads of 256 are Gemma's.
MODELS = {
    **{name: (preset(name), "auto", None) for name in ("smollm2-135m", "qwen3-0.6b", "qwen3-8b")},
    "qwen3-0.6b in float32": (preset("qwen3-0.6b"), "float32", None),
    "heads of 256": (
        dataclasses.replace(preset("qwen3-0.6b"), num_heads=4, num_kv_heads=1, head_dim=256),
        "auto",
        None,
    ),
    **{f"qwen3-8b, pages in {dtype}": (preset("qwen3-8b"), "auto", dtype) for dtype in ("int8",)},
    **{f"qwen3-8b in {form}": (preset("qwen3-8b"), "auto", None) for form in ("int4", "q4_k")},
}
# Name -> the layout of its matrices, for GPUs with kernels for them, and the passes that have such kernels.
LAYOUTS = {"qwen3-8b in int4": in_four_bits(128), "qwen3-8b in q4_k": BLOCKS["q4_k"]}
FEW_ROWS = ("verification, one row", "verification, 16 rows")
PASSES = {  # name -> rows B, tokens T of each, pages N that a row may have: 64 of 16 positions are not split
    "draft, one row": (1, 1, 256),
    "draft, 16 rows": (16, 1, 64),
    "draft, 16 long rows": (16, 1, 256),
    "verification, one row": (1, 5, 256),
    "verification, 16 rows": (16, 5, 64),
    "verification, 16 long rows": (16, 5, 256),
    "prefill": (16, 256, 256),
}
PAGES, PAGE_SIZE = 5000, 16
MATRICES = ("qkv", "next_qkv", "out", "next_out", "gate_up", "down")


OPS = (merge_tokens, slot_mapping, kv_write, paged_attention, self_attention, feed_forward, argmax_token)


def arguments(
    c: ModelConfig, dtype: str, stored: str | None, device: Device, rows: int, tokens: int, row_pages: int
) -> tuple[dict, dict[str, Any]]:
    """Name -> shape, and name -> option: what arguments of that name are, whichever op takes them."""
    shape = lambda dtype: lambda *dims: jax.ShapeDtypeStruct(dims, dtype)
    x, i32, f32 = (shape(dtype) for dtype in (compute_dtype(dtype, device), jnp.int32, jnp.float32))
    layer = c.layers[0]
    count, d, g2, mixed = rows * tokens, c.head_dim, 2 * c.num_kv_heads, c.num_heads * c.head_dim
    pages = jax.eval_shape(lambda: zeros(PAGES, PAGE_SIZE, g2, d, stored or x().dtype))
    arrays = {
        "tokens": i32(count), "next_tokens": i32(rows), "query_start": i32(rows + 1), "num_rejected": i32(rows),
        "positions": i32(count), "rejected": shape(jnp.bool_)(count), "block_table": i32(rows, row_pages),
        "kv_len": i32(rows), "num_keys": i32(rows), "slots": i32(count),
        "pages": pages, "kv": x(count, g2, d), "query": x(rows, tokens, c.num_heads, d),
        "x": x(rows, tokens, c.width), "norm": f32(c.width), "next_norm": f32(c.width),
        "qkv": x(c.width, layer.qkv_width), "next_qkv": x(c.width, layer.qkv_width), "table": x(c.vocab_size, c.width),
        "cos": f32(rows, tokens, d // 2), "sin": f32(rows, tokens, d // 2),
        "mixed": x(rows, tokens, mixed), "out": x(mixed, c.width), "next_out": x(mixed, c.width),
        "gate_up": x(c.width, 2 * c.mlp_width), "down": x(c.mlp_width, c.width),
    }  # fmt: skip
    options = {
        "page_size": PAGE_SIZE, "max_model_len": 4096, "pad_slot": PAGES * PAGE_SIZE, "scale": d**-0.5,
        "eps": c.norm_eps, "block": layer.mlp_block, "platform": device,
    }  # fmt: skip
    return arrays | ({"q_norm": f32(d), "k_norm": f32(d)} if c.qk_norm else {}), options


def cases(name: str, mesh: Mesh) -> dict[str, Callable[[], dict[str, Any]]]:
    here = NamedSharding(mesh, PartitionSpec())
    reordered = lambda layout, x: jax.eval_shape(interleaved, abstract(layout, x.shape, x.dtype.name))
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)

    def build(model: str, rows: int, tokens: int, row_pages: int) -> dict[str, Any]:
        arrays, options = arguments(*MODELS[model], GPUS[name].device, rows, tokens, row_pages)
        if layout := LAYOUTS.get(model):
            arrays |= {matrix: reordered(layout, arrays[matrix]) for matrix in MATRICES}
        ops = OPS if tokens <= 16 else OPS[:-1]  # prefill never samples
        of = lambda op, named: {name: named[name] for name in inspect.signature(op).parameters if name in named}
        every = lambda arrays: [op(**of(op, arrays), **of(op, options)) for op in ops]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), no_compilation_cache():
            return compile(jax.jit(every).lower(jax.tree.map(place, arrays)))[1]

    return {
        f"{model}, {step}": functools.partial(build, model, *dims)
        for model in MODELS
        for step, dims in PASSES.items()
        if model not in LAYOUTS or (GPUS[name].device.shares_much and step in FEW_ROWS)
    }
