"""One decoder for every family, composed by ModelConfig.

Parameters live in a flat dict, dotted name -> array ("layers.0.qkv"), which is what programs take as argument,
checkpoints fill. The nnx module is the description of the computation, and of its parameters: what else has to be known
of one is said where it is declared, and read by `parameters`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models.config import ModelConfig, Rope
from jaxspec.models.head import Head, product
from jaxspec.models.layers import Backend, Rows, attend, attend_densely, rotary_tables, second_half
from jaxspec.models.parameters import Parameter, declare
from jaxspec.models.table import looked_up
from jaxspec.parallel.placement import Placement
from pallas_kernels.plain import rms_norm
from pallas_kernels.streamed import once
from pallas_kernels.weights import nbytes

Params = Mapping[str, Any]  # name -> array, or a Weight of pallas_kernels.weights


class Layer(nnx.Module):
    """One transformer block. entry: the width of what it reads, where that is not x but comes to it normed already."""

    def __init__(self, config: ModelConfig, index: int, dtype: Any, entry: int | None = None) -> None:
        c = config
        matrix, norm = declare("matrix", dtype), declare("norm")
        self.config, self.window = c, c.windows[index]
        self.input_norm: Any = None if entry else norm(c.width)
        self.qkv = matrix(entry or c.width, c.qkv_width, axes=(None, "heads"), parts=c.merged["qkv"])
        if c.qkv_bias:
            self.qkv_bias = declare("bias", dtype)(c.qkv_width, axes=("heads",), parts=c.merged["qkv"])
        if c.qk_norm:
            self.q_norm, self.k_norm = norm(c.head_dim), norm(c.head_dim)
        self.out = matrix(c.num_heads * c.head_dim, c.width, axes=("heads", None))
        if c.sandwich_norm:
            self.post_attention_norm, self.post_mlp_norm = norm(c.width), norm(c.width)
        self.mlp_norm = norm(c.width)
        self.gate_up = matrix(c.width, 2 * c.mlp_width, axes=(None, "mlp"), parts=c.merged["gate_up"])
        self.down = matrix(c.mlp_width, c.width, axes=("mlp", None))

    def attention(self, x, normed, pages, rows: Rows, ropes, backend: Backend, **few: int):
        """The first half: x [B,T,E] -> ([B,T,H*D], pages). normed: x by this layer's norm, or None. few: num_queries,
        as in `self_attention`, of a pass over pages."""
        c = self.config
        used = {"qkv": self.qkv, "next_out": self.out}
        if self.input_norm is not None:
            used["norm"] = self.input_norm
        if c.qkv_bias:
            used["bias"] = self.qkv_bias
        if c.qk_norm:
            used |= {"q_norm": self.q_norm, "k_norm": self.k_norm}
        weights = {name: parameter[...] for name, parameter in used.items()}
        axes = {name: parameter.declared.axes for name, parameter in used.items()}
        if normed is not None:
            weights["normed"] = normed
        tables = ropes[c.local_rope if self.window and c.local_rope else c.rope]
        options: dict[str, Any] = {
            "eps": c.norm_eps,
            "scale": c.query_scale,
            "window": self.window,
            "soft_cap": c.soft_cap,
        }
        if pages is None:
            return attend_densely(x, weights, tables, backend, num_kv_heads=c.num_kv_heads, **options), None
        return attend(x, weights, axes, pages, rows, tables, backend, **options, **few)

    def feed_forward(self, x, mixed, backend: Backend, **following: jax.Array):
        """The second half: x [B,T,E], mixed [B,T,H*D] -> (x, the same by next_norm or None). following: next_norm and
        next_qkv, of the next layer; after the last there is the model's norm."""
        c = self.config
        own = {"out": self.out, "gate_up": self.gate_up, "down": self.down, "norm": self.mlp_norm}
        if c.sandwich_norm:
            own |= {name: getattr(self, name) for name in ("post_attention_norm", "post_mlp_norm")}
        weights = {name: parameter[...] for name, parameter in own.items()} | following
        axes = {name: parameter.declared.axes for name, parameter in own.items()} | {"next_qkv": self.qkv.declared.axes}
        options: dict[str, Any] = {"eps": c.norm_eps, "activation": c.activation, "block": c.merged["gate_up"]["gate"]}
        return second_half(x, mixed, weights, axes, backend, **options)


def ropes_of(c: ModelConfig, rows: Rows, backend: Backend) -> dict[Rope, tuple[jax.Array, jax.Array]]:
    """Rotary tables of these rows, one of each base that a layer asks for."""
    tables = functools.partial(once, rotary_tables) if backend.streams else rotary_tables
    return {r: tables(r, c.head_dim, rows.positions) for r in {c.rope, c.local_rope} if r is not None}


def through(layers: Sequence[Layer], x, pages, rows: Rows, backend: Backend, *, norm=None, entry=None):
    """x [B,T,E] through these layers -> (x, the same by `norm`, pages, what entered each layer and left the last).

    norm: of what comes after, or None. entry: what the first one attends with in x's place, normed already, or None.
    """
    ropes, eps = ropes_of(layers[0].config, rows, backend), layers[0].config.norm_eps
    following: list[dict[str, Any]] = [
        {"next_norm": layer.input_norm[...], "next_qkv": layer.qkv[...]} for layer in layers[1:]
    ]
    following.append({} if norm is None else {"next_norm": norm})
    normed, written, passed = entry, [], [x]
    for i, (layer, layer_pages, ahead) in enumerate(zip(layers, pages, following, strict=True)):
        attending = x if i or entry is None else entry
        mixed, layer_pages = layer.attention(attending, normed, layer_pages, rows, ropes, backend)
        x, normed = layer.feed_forward(x, mixed, backend, **ahead)
        written.append(layer_pages)
        passed.append(x)
    if norm is not None and normed is None:
        normed = rms_norm(norm, x, eps)
    return x, normed, tuple(written), passed


class Decoder(Head):
    """A causal language model over paged caches."""

    def __init__(self, config: ModelConfig, dtype: Any) -> None:
        self.config, self.dtype = config, jnp.dtype(dtype)
        c, table, matrix = config, declare("table", dtype), declare("matrix", dtype)
        table_shape, borrowed = (c.vocab_size, c.embed_width or c.width), c.embed_width is not None
        self.embed = table(*table_shape, axes=("vocab", None), head=c.tied, borrowed=borrowed)
        if c.embed_width:
            self.embed_in = matrix(c.embed_width, c.width)
        self.layers = nnx.List([Layer(c, i, dtype) for i in range(c.num_layers)])
        self.norm = declare("norm")(c.width)
        self.declare_head(c, dtype)

    def __call__(self, tokens, pages, rows: Rows, backend: Backend, taps: tuple[int, ...] = ()):
        """tokens i32[B,T] -> (hidden [B,T,E] by the last norm, pages, what goes into the layers `taps`, in that order;
        L names what goes into the last norm).

        pages: of each layer, or None for a pass without a cache.
        """
        x = self.embedded(tokens, backend, differentiable=None in pages)
        _, hidden, pages, passed = through(list(self.layers), x, pages, rows, backend, norm=self.norm[...])
        return hidden, pages, tuple(passed[i] for i in taps)

    def embedded(self, tokens, backend: Backend, *, differentiable: bool = False):
        """tokens i32[B,T] -> x [B,T,E] that enters the first layer."""
        c, table = self.config, self.embed[...]
        # The gradient of a lookup adds up as many rows as an id occurs: in float32.
        rows = looked_up(table.astype(jnp.float32) if differentiable else table, tokens, backend)
        x = rows.astype(self.dtype)
        x = x * jnp.asarray(c.embed_scale, x.dtype) if c.embed_scale != 1.0 else x
        return product(x, self.embed_in[...], backend).astype(x.dtype) if c.embed_width else x


@functools.singledispatch
def module(config: ModelConfig, dtype: Any) -> Any:
    """The nnx module that a configuration describes: a Decoder, or what is registered for its class."""
    return Decoder(config, dtype)


@functools.cache
def describe(config: ModelConfig, dtype: str) -> tuple[nnx.GraphDef, dict]:
    """(graph definition, path -> abstract parameter) of its module, without allocating it."""
    graph, state = nnx.split(nnx.eval_shape(lambda: module(config, jnp.dtype(dtype))))
    return graph, dict(nnx.to_flat_state(state))


def dotted(path: tuple) -> str:
    return ".".join(map(str, path))


def bind(config: ModelConfig, params: Params) -> Any:
    """The module over these parameters. Call it inside the traced function: it costs nothing at run time."""
    graph, abstract = describe(config, compute_dtype(params).name)
    flat = {path: leaf.replace(params[dotted(path)]) for path, leaf in abstract.items()}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def compute_dtype(params: Params) -> Any:
    """Return the dtype of activations: the widest of the matrices', as of a draft that reads its target's table."""
    return jnp.result_type(*(x.dtype for x in params.values() if len(x.shape) > 1))


def whole(config: ModelConfig, params: Params, tokens: jax.Array, backend: Backend) -> tuple[Decoder, jax.Array]:
    """A causal pass over whole rows without a cache, for training: tokens i32[B,T], rows from position 0 ->
    (the bound decoder, hidden [B,T,E])."""
    decoder = bind(config, params)
    hidden, _, _ = decoder(tokens, (None,) * config.num_layers, whole_rows(*tokens.shape), backend)
    return decoder, hidden


def whole_rows(count: int, length: int) -> Rows:
    """So many rows of so many tokens, from position 0, without a cache."""
    return Rows(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (count, length)))


def parameters(config: ModelConfig, dtype: Any = "float32") -> dict[str, Parameter]:
    """Name -> what the module says of each parameter. dtype: of most."""
    _, abstract = describe(config, jnp.dtype(dtype).name)
    return {dotted(path): leaf.declared for path, leaf in abstract.items()}


def abstract_params(config: ModelConfig, dtype: Any, placement: Placement) -> dict[str, Parameter]:
    """The same, each with where it lies: what a checkpoint has to fill."""
    lies = lambda p: dataclasses.replace(p, sharding=placement.of_parameter(p.axes, p.shape))
    return {name: lies(p) for name, p in parameters(config, dtype).items()}


def read_by_pass(
    config: ModelConfig, params: Params, *, logits: bool = True, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return the parameters that one pass reads, except those named in `without`.

    It reads single rows of an embedding table that is not the head. Without logits (prefill) it reads no head either.
    """
    read = {name for name, p in parameters(config).items() if (logits if p.head else p.kind != "table")}
    return {name: x for name, x in params.items() if name in read and name not in without}


def weight_bytes(config: ModelConfig, params: Params, **which: Any) -> int:
    """Count the bytes of what `read_by_pass` returns."""
    return nbytes(read_by_pass(config, params, **which))


def random_params(
    config: ModelConfig, dtype: Any, placement: Placement, seed: int = 0, *, known: Params | None = None
) -> dict[str, jax.Array]:
    """Random weights of a plausible scale, for tests and benchmarks, beside those that are known."""
    abstract = {name: p for name, p in abstract_params(config, dtype, placement).items() if name not in (known or {})}

    def leaf(index: int, p: Parameter) -> jax.Array:
        if p.kind == "ids":  # a reduced vocabulary has the first ids
            return jax.device_put(np.minimum(np.arange(p.shape[0], dtype=p.dtype), config.head_size), p.sharding)
        if p.kind == "norm":
            return jax.device_put(np.ones(p.shape, p.dtype), p.sharding)
        fan_in = p.shape[-1] if p.kind == "table" else p.shape[0]
        draw = normal(p.shape, p.dtype, p.sharding, fan_in**-0.5)
        return draw(jax.random.fold_in(jax.random.key(seed), index))

    return {name: leaf(i, p) for i, (name, p) in enumerate(abstract.items())} | dict(known or {})


@functools.cache
def normal(shape: tuple[int, ...], dtype: Any, lies: Any, deviation: float) -> Callable[[jax.Array], jax.Array]:
    """key -> random numbers. A program a shape: one for all weights would take minutes to compile on a GPU."""
    draw = lambda key: (jax.random.normal(key, shape, jnp.float32) * deviation).astype(dtype)
    return jax.jit(draw, out_shardings=lies)
