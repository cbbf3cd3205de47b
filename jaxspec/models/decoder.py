"""One decoder for every family, composed by ModelConfig.

Parameters live in a flat dict from dotted names ("layers.0.qkv") to arrays. Checkpoints fill this dict, and programs
take it as an argument. The nnx module describes the computation and its parameters. Each parameter is declared there
with its axes, parts and kind (`Parameter`); `parameters` returns these declarations.
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

Params = Mapping[str, Any]  # by name: an array, or a Weight of pallas_kernels.weights


class Layer(nnx.Module):
    """One layer: the mixer and the MLP that its LayerConfig names.

    entry: width of an input that replaces x in the mixer and arrives normed; None if the mixer reads x.
    """

    input_norm: Any
    qkv: Any

    def __init__(self, config: ModelConfig, index: int, dtype: Any, entry: int | None = None) -> None:
        self.config = config
        self.own = config.layers[index]
        MIXERS[self.own.mixer].declare(self, config, self.own, dtype, entry)
        MLPS[self.own.mlp].declare(self, config, self.own, dtype)

    def mix(self, x, normed, memory, read, rows: Rows, ropes, backend: Backend, **options: Any):
        """Compute the first half: return (mixed [B,T,_], the layer's cache) for x [B,T,E]."""
        return MIXERS[self.own.mixer].mix(self, x, normed, memory, read, rows, ropes, backend, **options)

    def feed_forward(self, x, mixed, backend: Backend, **following: Any):
        """Compute the second half: return (x [B,T,E], x normed by next_norm or None) for x and mixed."""
        return MLPS[self.own.mlp].feed_forward(self, x, mixed, backend, **following)


def through(layers: Sequence[Layer], x, cache, rows: Rows, backend: Backend, *, norm=None, entry=None):
    """Pass x [B,T,E] through these layers; return (x, x normed by `norm`, caches, inputs).

    The list `inputs` holds the input of each layer, and last the output of the last layer.

    cache: caches of the layers with keys and values of their own, in order; in a pass without a cache, None for each.
    norm: scale of the norm after the last layer, or None.
    entry: normed input that the first layer's mixer reads in place of x, or None.
    """
    eps = layers[0].config.norm_eps
    ropes = rotary_tables([layer.own for layer in layers], rows, backend)
    following = [ahead(layer) for layer in layers[1:]] + [{} if norm is None else {"next_norm": norm}]
    memories: list[Any] = []
    remaining = iter(cache)
    inputs = [x]
    normed = entry
    for i, (layer, after) in enumerate(zip(layers, following, strict=True)):
        mixer_input = entry if i == 0 and entry is not None else x
        shares = layer.own.shares
        if shares is None:
            memory, read = next(remaining), None
        else:
            memory, read = None, memories[shares]
        mixed, memory = layer.mix(mixer_input, normed, memory, read, rows, ropes, backend)
        x, normed = layer.feed_forward(x, mixed, backend, **after)
        memories.append(memory)
        inputs.append(x)
    if norm is not None and normed is None:
        normed = rms_norm(norm, x, eps)
    written = (memory for layer, memory in zip(layers, memories, strict=True) if layer.own.shares is None)
    return x, normed, tuple(written), inputs


def ahead(layer: Layer) -> dict[str, Any]:
    """Return the parameters of a layer that the layer before it can read early.

    They are its input norm and, if it has one, its merged matrix qkv.
    """
    found: dict[str, Any] = {"next_norm": layer.input_norm[...]}
    if hasattr(layer, "qkv"):
        found["next_qkv"] = layer.qkv[...]
    return found


class Decoder(Head):
    """A causal language model over paged caches."""

    def __init__(self, config: ModelConfig, dtype: Any) -> None:
        self.config = config
        self.dtype = jnp.dtype(dtype)
        c = config
        from_target = c.embed_width is not None
        table = declare("table", dtype)
        self.embed = table(
            c.vocab_size, c.embed_width or c.width, axes=("vocab", None), head=c.tied, from_target=from_target
        )
        if c.embed_width:
            self.embed_in = declare("matrix", dtype)(c.embed_width, c.width)
        self.layers = nnx.List([Layer(c, i, dtype) for i in range(c.num_layers)])
        self.norm = declare("norm")(c.width)
        self.declare_head(c, dtype)

    def __call__(self, tokens, cache, rows: Rows, backend: Backend, taps: tuple[int, ...] = ()):
        """Pass tokens i32[B,T] through the model; return (hidden, cache, tapped).

        hidden is the output [B,T,E] of the last norm. tapped holds the inputs of the layers `taps`, in that order; L
        names the input of the last norm.

        cache: as in `through`.
        """
        x = self.embedded(tokens, backend, differentiable=None in cache)
        _, hidden, cache, inputs = through(list(self.layers), x, cache, rows, backend, norm=self.norm[...])
        return hidden, cache, tuple(inputs[i] for i in taps)

    def embedded(self, tokens, backend: Backend, *, differentiable: bool = False):
        """Return the input x [B,T,E] of the first layer for tokens i32[B,T]."""
        c = self.config
        table = self.embed[...]
        if differentiable:
            # The gradient of a lookup sums one row for each occurrence of an id: that sum needs float32.
            table = table.astype(jnp.float32)
        x = looked_up(table, tokens, backend).astype(self.dtype)
        if c.embed_scale != 1.0:
            x = x * jnp.asarray(c.embed_scale, x.dtype)
        if c.embed_width:
            x = product(x, self.embed_in[...], backend).astype(x.dtype)
        return x


@functools.singledispatch
def module(config: ModelConfig, dtype: Any) -> Any:
    """Return the nnx module that a configuration describes: a Decoder, or the module registered for its class."""
    return Decoder(config, dtype)


@functools.cache
def describe(config: ModelConfig, dtype: str) -> tuple[nnx.GraphDef, dict]:
    """Return (graph definition, abstract parameters by path) of the model's module, without allocating it."""
    graph, state = nnx.split(nnx.eval_shape(lambda: module(config, jnp.dtype(dtype))))
    return graph, dict(nnx.to_flat_state(state))


def dotted(path: tuple) -> str:
    """Return the name of the parameter at a path of nnx."""
    return ".".join(map(str, path))


def bind(config: ModelConfig, params: Params) -> Any:
    """Return the module with these parameters. Call it inside the traced function: it costs nothing at run time."""
    graph, abstract = describe(config, compute_dtype(params).name)
    flat = {path: leaf.replace(params[dotted(path)]) for path, leaf in abstract.items()}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def compute_dtype(params: Params) -> Any:
    """Return the dtype of activations: the widest dtype of all matrices.

    They may differ, for example in a draft that reads its target's embedding table.
    """
    return jnp.result_type(*(x.dtype for x in params.values() if len(x.shape) > 1))


def no_cache(config: ModelConfig) -> tuple[None, ...]:
    """Return the argument `cache` of a pass without a cache."""
    return (None,) * len(config.cached_layers)


def whole(config: ModelConfig, params: Params, tokens: jax.Array, backend: Backend) -> tuple[Decoder, jax.Array]:
    """Run a causal pass over whole rows without a cache, for training; return (bound decoder, hidden [B,T,E]).

    tokens: i32[B,T]; each row begins at position 0.
    """
    decoder = bind(config, params)
    hidden, _, _ = decoder(tokens, no_cache(config), whole_rows(*tokens.shape), backend)
    return decoder, hidden


def parameters(config: ModelConfig, dtype: Any = "float32") -> dict[str, Parameter]:
    """Return the declaration of each parameter, by name.

    dtype: the dtype of the weights; norms and ids have their own (see `declare`).
    """
    _, abstract = describe(config, jnp.dtype(dtype).name)
    return {dotted(path): leaf.declared for path, leaf in abstract.items()}


def abstract_params(config: ModelConfig, dtype: Any, placement: Placement) -> dict[str, Parameter]:
    """Return the declaration of each parameter with its sharding, by name: the arrays that a checkpoint must fill."""
    return {
        name: dataclasses.replace(p, sharding=placement.of_parameter(p.axes, p.shape))
        for name, p in parameters(config, dtype).items()
    }


def read_by_pass(
    config: ModelConfig, params: Params, *, logits: bool = True, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return the parameters that one pass reads, except those named in `without`.

    An embedding table that is not the head is left out, because a pass reads only single rows of it. Without logits
    (prefill) the head is left out too.
    """
    read = {name for name, p in parameters(config).items() if (logits if p.head else p.kind != "table")}
    return {name: x for name, x in params.items() if name in read and name not in without}


def weight_bytes(config: ModelConfig, params: Params, **which: Any) -> int:
    """Count the bytes of the parameters that `read_by_pass` returns."""
    return nbytes(read_by_pass(config, params, **which))


def random_params(
    config: ModelConfig, dtype: Any, placement: Placement, seed: int = 0, *, known: Params | None = None
) -> dict[str, jax.Array]:
    """Return random weights of a plausible scale, for tests and benchmarks.

    known: parameters that are returned as they are instead.
    """
    known = known or {}
    abstract = {name: p for name, p in abstract_params(config, dtype, placement).items() if name not in known}

    def draw(index: int, p: Parameter) -> jax.Array:
        if p.kind == "ids":  # a reduced vocabulary holds the first ids
            return jax.device_put(np.minimum(np.arange(p.shape[0], dtype=p.dtype), config.head_size), p.sharding)
        if p.kind == "norm":
            return jax.device_put(np.ones(p.shape, p.dtype), p.sharding)
        fan_in = p.shape[-1] if p.kind == "table" else p.shape[0]
        program = normal(p.shape, p.dtype, p.sharding, fan_in**-0.5)
        return program(jax.random.fold_in(jax.random.key(seed), index))

    return {name: draw(i, p) for i, (name, p) in enumerate(abstract.items())} | dict(known)


@functools.cache
def normal(shape: tuple[int, ...], dtype: Any, sharding: Any, deviation: float) -> Callable[[jax.Array], jax.Array]:
    """Return a compiled function from a key to normally distributed numbers.

    Each shape has its own program: one program for all weights would take minutes to compile on a GPU.
    """

    def draw(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * deviation).astype(dtype)

    return jax.jit(draw, out_shardings=sharding)
