"""Attention as a layer's mixer, over the keys and values in a row's pages or in a pass without a cache."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxspec.cache.pages import PagedKV, PagedLayer, paged_layer
from jaxspec.common.errors import UnsupportedError
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.layer_config import LayerConfig
from jaxspec.models.parameters import declare as declared
from jaxspec.models.rope import Rope
from jaxspec.models.rows import Rows
from jaxspec.parallel.placement import per_shard
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.pages import AnyPages
from pallas_kernels.pages import specs as specs_of_pages
from pallas_kernels.plain import grown, project, project_queries, rms_norm
from pallas_kernels.self_attention import self_attention
from pallas_kernels.streamed import once
from pallas_kernels.weights import Prepared, product
from pallas_kernels.weights import specs as partition

Tables = Mapping[tuple[Rope, int], tuple[jax.Array, jax.Array]]  # (cos, sin) by (Rope, head size)

# Parameters that only some layers have, as {argument of `self_attention` or of `gated`: attribute of the Layer}.
OPTIONAL_PARAMETERS = {"norm": "input_norm", "bias": "qkv_bias", "q_norm": "q_norm", "k_norm": "k_norm"}
OPTIONAL_PARAMETERS["gate"] = "output_gate"


class KeysValues(NamedTuple):
    """Keys and values [B,T,G,D] of a pass without a cache, in which the tokens are the whole text of each row."""

    key: jax.Array
    value: jax.Array


def declare(layer: Any, config: ModelConfig, own: LayerConfig, dtype: Any, entry: int | None) -> None:
    """Add the parameters of attention to a Layer.

    own: configuration of the layer.
    entry: width of the input that attention reads in place of x, already normed; None if it reads x.
    """
    c = config
    matrix = declared("matrix", dtype)
    bias = declared("bias", dtype)
    norm = declared("norm")
    layer.input_norm = None if entry or not c.pre_norm else norm(c.width)
    if own.shares is None:
        merged: dict[str, Any] = {"parts": own.qkv_parts, "copies": {"k": own.kv_copies, "v": own.kv_copies}}
        layer.qkv = matrix(entry or c.width, own.qkv_width, axes=(None, "heads"), **merged)
        if c.qkv_bias:
            layer.qkv_bias = bias(own.qkv_width, axes=("heads",), **merged)
    else:
        width = own.num_heads * own.head_dim
        layer.q = matrix(entry or c.width, width, axes=(None, "heads"))
        if c.qkv_bias:
            layer.q_bias = bias(width, axes=("heads",))
    if c.wide_qk_norm:
        layer.q_norm = norm(own.num_heads * own.head_dim, axes=("heads",))
        if own.shares is None:
            one = {"parts": {"": own.head_dim}, "copies": {"": own.kv_copies}}
            layer.k_norm = norm(own.num_kv_heads * own.head_dim, axes=("heads",), **one)
    elif c.qk_norm and not c.plain_qk_norm:
        layer.q_norm = norm(own.head_dim)
        if own.shares is None:
            layer.k_norm = norm(own.head_dim)
    if c.output_gate and own.shares is None:
        layer.output_gate = matrix(entry or c.width, own.num_heads * own.head_dim, axes=(None, "heads"))
    layer.out = matrix(own.num_heads * own.head_dim, c.width, axes=("heads", None))


def layer_layout(own: LayerConfig, dtype: Any, platform: str) -> PagedLayer:
    """Return the layout of the KV cache of a layer: its heads, their padded size and the dtype."""
    return paged_layer(own.num_kv_heads, own.head_dim, dtype, platform, own.window)


def rotary_tables(layers: Iterable[LayerConfig], rows: Rows, backend: Backend) -> Tables:
    """Compute (cos, sin) of the rotary angles of these rows' positions, for each Rope and head size of the layers."""
    compute = functools.partial(once, cos_and_sin) if backend.streams else cos_and_sin
    wanted = dict.fromkeys((layer.rope, layer.head_dim) for layer in layers)
    return {(rope, size): compute(rope, size, rows.positions) for rope, size in wanted}


def cos_and_sin(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute cos and sin [B,T,D/2] of the rotary angles of positions [B,T], in float32."""
    frequencies = rope.frequencies(head_dim)
    angles = positions[:, :, None].astype(jnp.float32) * frequencies.astype(np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.scale == 1.0:
        return cos, sin
    scale = np.where(frequencies == 0.0, 1.0, rope.scale).astype(np.float32)
    return cos * scale, sin * scale


def mix(
    layer: Any,
    x: jax.Array,
    normed: jax.Array | None,
    memory: Any,
    read: Any,
    rows: Rows,
    ropes: Tables,
    backend: Backend,
    num_queries: int | None = None,
) -> tuple[jax.Array, Any]:
    """Attend with x [B,T,E]; return (mixed [B,T,H*D], the layer's updated cache).

    normed: x normed by this layer's norm; None if it was not computed yet.
    memory: the layer's KV cache; None in a pass without a cache.
    read: the cache of the earlier layer whose keys and values this layer reads; None if this layer has its own.
    ropes: rotary tables of `rotary_tables`.
    num_queries: number of last tokens of each row that attend, in a pass with a cache; None for all T.
    """
    if layer.own.shares is not None:
        return shared_attention(layer, x, normed, read, rows, ropes, backend), None
    if memory is None:
        return without_cache(layer, x, normed, rows, ropes, backend)
    if layer.config.output_gate:
        normed = normed_by(layer, x, normed)
    used = {"qkv": layer.qkv, "next_out": layer.out}
    for name, attribute in OPTIONAL_PARAMETERS.items():
        parameter = getattr(layer, attribute, None)
        if parameter is not None:
            used[name] = parameter
    weights = {name: parameter[...] for name, parameter in used.items()}
    axes = {name: parameter.declared.axes for name, parameter in used.items()}
    if normed is not None or layer.input_norm is None:
        weights["normed"] = x if normed is None else normed
    options: dict[str, Any] = options_of(layer) | {"eps": layer.config.norm_eps, "num_queries": num_queries}
    if layer.config.wide_qk_norm or layer.config.plain_qk_norm:
        weights |= {name: value(layer, name) for name in ("q_norm", "k_norm")}
    if layer.config.wide_qk_norm:
        axes |= dict.fromkeys(("q_norm", "k_norm"), ("heads", None))
        options["sum_over"] = backend.sum_over
    options["v_norm"] = layer.config.v_norm

    def shard(
        x: jax.Array,
        weights: dict[str, Any],
        pages: AnyPages,
        where: dict[str, Any],
        tables: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, AnyPages]:
        cos, sin = tables
        own = {name: weight for name, weight in weights.items() if name != "gate"}
        mixed, pages = self_attention(x, **own, pages=pages, **where, cos=cos, sin=sin, **options, **backend.how())
        return gated(mixed, weights.get("normed"), weights.get("gate"), backend), pages

    rows = rows.of_layer(layer.own.window)
    where = {name: getattr(rows, name) for name in ("slots", "block_table", "kv_len", "num_keys", "tree")}
    if (growth := query_factor(layer.own.rope, rows)) is not None:
        where["query_factor"] = growth
    placement = backend.placement
    if placement is not None:
        specs = {name: partition(w, placement.spec(axes.get(name, ()))) for name, w in weights.items()}
        of_pages = specs_of_pages(memory.pages, placement.of_pages)
        in_specs = (P(), specs, of_pages, P(), P())
        out_specs = (placement.of_heads, of_pages)
        shard = per_shard(shard, placement, in_specs, out_specs)
    mixed, pages = shard(x, weights, memory.pages, where, tables_of(layer, ropes))
    return mixed, PagedKV(pages)


def gated(mixed: jax.Array, normed: Any, gate: Any, backend: Backend) -> jax.Array:
    """Scale the output [B,T,_] of attention by the sigmoid of normed @ gate. Return it unchanged for a gate of None.

    normed: normed input of the layer, whose last T tokens attended.
    """
    if gate is None:
        return mixed
    last = jax.tree.map(lambda rows: rows[:, rows.shape[1] - mixed.shape[1] :], normed)  # a tuple if it was rounded
    mixed = mixed.plain() if isinstance(mixed, Prepared) else mixed
    return mixed * jax.nn.sigmoid(product(last, gate, device=backend.device))


def options_of(layer: Any) -> dict[str, Any]:
    """Return the keyword arguments scale, window and soft_cap of a layer's attention."""
    return {"scale": layer.own.query_scale, "window": layer.own.window, "soft_cap": layer.config.soft_cap}


def tables_of(layer: Any, ropes: Tables) -> tuple[jax.Array, jax.Array]:
    """Return the rotary tables cos and sin for a layer."""
    return ropes[layer.own.rope, layer.own.head_dim]


def query_factor(rope: Rope, rows: Rows) -> jax.Array | None:
    """Return the factors f32[B,T] of the queries at these rows' positions (`Rope.query_growth`); None if they are 1."""
    if not rope.query_growth or rope.context is None:
        return None
    return 1.0 + rope.query_growth * jnp.log1p((rows.positions // rope.context).astype(jnp.float32))


def value(layer: Any, name: str) -> Any:
    """Return the value of a layer's parameter; None if the layer has no such parameter.

    A norm over all heads together has the shape [heads, D]. The scale of a norm without one is 1.
    """
    parameter = getattr(layer, name, None)
    if layer.config.qk_norm and layer.config.plain_qk_norm and name in ("q_norm", "k_norm"):
        return jnp.ones(layer.own.head_dim)
    if parameter is None:
        return None
    wide = layer.config.wide_qk_norm and name in ("q_norm", "k_norm")
    return parameter[...].reshape(-1, layer.own.head_dim) if wide else parameter[...]


def normed_by(layer: Any, x: jax.Array, normed: jax.Array | None) -> jax.Array:
    """Return x normed by the layer's input norm, or x if the layer has none.

    normed: this result, if it was computed already; else None.
    """
    if normed is None and layer.input_norm is None:
        return x
    return rms_norm(layer.input_norm[...], x, layer.config.norm_eps) if normed is None else normed


def shared_attention(
    layer: Any, x: jax.Array, normed: jax.Array | None, read: Any, rows: Rows, ropes: Tables, backend: Backend
) -> jax.Array:
    """Attend with the queries of x to the keys and values of an earlier layer, in that layer's cache `read`."""
    own = layer.own
    eps = layer.config.norm_eps
    cos, sin = tables_of(layer, ropes)
    heads = product(normed_by(layer, x, normed), layer.q[...], device=backend.device)
    query = project_queries(heads, value(layer, "q_bias"), value(layer, "q_norm"), cos, sin, own.num_heads, eps)
    query = grown(query, query_factor(own.rope, rows))
    if isinstance(read, KeysValues):
        return dense_attention(layer, query, read, backend)

    def shard(query: jax.Array, pages: AnyPages, where: dict[str, Any]) -> jax.Array:
        padded = jnp.pad(query, ((0, 0),) * 3 + ((0, pages.shape[-1] - own.head_dim),))
        mixed = paged_attention(padded, pages, **where, **options_of(layer), **backend.how())
        return mixed[..., : own.head_dim].reshape(*mixed.shape[:2], -1)

    rows = rows.of_layer(own.window)
    where = {name: getattr(rows, name) for name in ("block_table", "kv_len", "num_keys", "tree")}
    placement = backend.placement
    if placement is not None:
        of_pages = specs_of_pages(read.pages, placement.of_pages)
        in_specs = (P(None, None, placement.axes, None), of_pages, P())
        shard = per_shard(shard, placement, in_specs, placement.of_heads)
    return shard(query, read.pages, where)


def without_cache(
    layer: Any, x: jax.Array, normed: jax.Array | None, rows: Rows, ropes: Tables, backend: Backend
) -> tuple[jax.Array, KeysValues]:
    """Attend in a differentiable pass without a cache, in which x [B,T,E] covers the whole text of each row.

    Return (mixed [B,T,H*D], keys and values).

    Raises: UnsupportedError for a soft cap of attention scores.
    """
    eps = layer.config.norm_eps
    cos, sin = tables_of(layer, ropes)
    bias = value(layer, "qkv_bias")
    q_norm = value(layer, "q_norm")
    k_norm = value(layer, "k_norm")
    normed = normed_by(layer, x, normed)
    heads = product(normed, layer.qkv[...])
    groups, v_norm = layer.own.num_kv_heads, layer.config.v_norm
    query, key, val = project(heads, bias, q_norm, k_norm, cos, sin, groups, eps, v_norm=v_norm)
    query = grown(query, query_factor(layer.own.rope, rows))
    keys_values = KeysValues(key, val)
    mixed = dense_attention(layer, query, keys_values, backend)
    return gated(mixed, normed, value(layer, "output_gate"), backend), keys_values


def dense_attention(layer: Any, query: jax.Array, keys_values: KeysValues, backend: Backend) -> jax.Array:
    """Attend causally with query [B,T,H,D] to the keys and values of whole texts; return [B,T,H*D]."""
    soft_cap = layer.config.soft_cap
    if soft_cap is not None:
        raise UnsupportedError(
            f"attention scores with a soft cap ({soft_cap}) are not supported in passes without a cache"
        )
    window = layer.own.window
    mixed = jax.nn.dot_product_attention(
        query,
        keys_values.key,
        keys_values.value,
        scale=layer.own.query_scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=backend.dense_attention,
    )
    return mixed.reshape(*query.shape[:2], -1)
