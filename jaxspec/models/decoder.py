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

from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.head import Head, product
from jaxspec.models.mixers import MIXERS
from jaxspec.models.mixers.attention import rotary_tables
from jaxspec.models.mlps import MLPS
from jaxspec.models.parameters import Parameter, declare
from jaxspec.models.rows import Rows, whole_rows
from jaxspec.models.table import looked_up
from jaxspec.parallel.placement import Placement
from pallas_kernels.plain import rms_norm
from pallas_kernels.weights import nbytes

Params = Mapping[str, Any]  # name -> array, or a Weight of pallas_kernels.weights


class Layer(nnx.Module):
    """One layer: a mixer and an MLP, as its LayerConfig names them.

    entry: the width of what it reads, where that is not x but comes to it normed already.
    """

    input_norm: Any
    qkv: Any

    def __init__(self, config: ModelConfig, index: int, dtype: Any, entry: int | None = None) -> None:
        self.config, self.own = config, config.layers[index]
        MIXERS[self.own.mixer].declare(self, config, self.own, dtype, entry)
        MLPS[self.own.mlp].declare(self, config, self.own, dtype)

    def mix(self, x, normed, memory, read, rows: Rows, ropes, backend: Backend, **options: Any):
        """Compute the first half: x [B,T,E] -> (mixed [B,T,_], what the layer remembers)."""
        return MIXERS[self.own.mixer].mix(self, x, normed, memory, read, rows, ropes, backend, **options)

    def feed_forward(self, x, mixed, backend: Backend, **following: Any):
        """Compute the second half: x [B,T,E], mixed -> (x, the same by next_norm or None)."""
        return MLPS[self.own.mlp].feed_forward(self, x, mixed, backend, **following)


def through(layers: Sequence[Layer], x, cache, rows: Rows, backend: Backend, *, norm=None, entry=None):
    """Pass x [B,T,E] through these layers -> (x, the same by `norm`, cache, what entered each layer and left the last).

    cache: what each layer with keys and values of its own remembers, in their order; None for each without a cache.
    norm: of what comes after, or None.
    entry: what the first layer attends with in x's place, normed already, or None.
    """
    eps, ropes = layers[0].config.norm_eps, rotary_tables([layer.own for layer in layers], rows, backend)
    following = [ahead(layer) for layer in layers[1:]] + [{} if norm is None else {"next_norm": norm}]
    memories: list[Any] = []
    passed, normed, remaining = [x], entry, iter(cache)
    for i, (layer, after) in enumerate(zip(layers, following, strict=True)):
        attending = x if i or entry is None else entry
        shares = layer.own.shares
        memory, read = (next(remaining), None) if shares is None else (None, memories[shares])
        mixed, memory = layer.mix(attending, normed, memory, read, rows, ropes, backend)
        x, normed = layer.feed_forward(x, mixed, backend, **after)
        memories.append(memory)
        passed.append(x)
    if norm is not None and normed is None:
        normed = rms_norm(norm, x, eps)
    written = (memory for layer, memory in zip(layers, memories, strict=True) if layer.own.shares is None)
    return x, normed, tuple(written), passed


def ahead(layer: Layer) -> dict[str, Any]:
    """Return what the layer before can read ahead: its norm, and the matrix of its first product where it is merged."""
    found: dict[str, Any] = {"next_norm": layer.input_norm[...]}
    return found | ({"next_qkv": layer.qkv[...]} if hasattr(layer, "qkv") else {})


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

    def __call__(self, tokens, cache, rows: Rows, backend: Backend, taps: tuple[int, ...] = ()):
        """Pass tokens i32[B,T] through -> (hidden [B,T,E] by the last norm, cache, the inputs of the layers `taps`, in
        that order; L names the input of the last norm).

        cache: as in `through`.
        """
        x = self.embedded(tokens, backend, differentiable=None in cache)
        _, hidden, cache, passed = through(list(self.layers), x, cache, rows, backend, norm=self.norm[...])
        return hidden, cache, tuple(passed[i] for i in taps)

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


def no_cache(config: ModelConfig) -> tuple[None, ...]:
    """Return what stands in the cache's place in a pass without one."""
    return (None,) * len(config.cached_layers)


def whole(config: ModelConfig, params: Params, tokens: jax.Array, backend: Backend) -> tuple[Decoder, jax.Array]:
    """A causal pass over whole rows without a cache, for training: tokens i32[B,T], rows from position 0 ->
    (the bound decoder, hidden [B,T,E])."""
    decoder = bind(config, params)
    hidden, _, _ = decoder(tokens, no_cache(config), whole_rows(*tokens.shape), backend)
    return decoder, hidden


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
