"""One decoder for all model families, composed as a ModelConfig describes.

Parameters are kept in a flat dict from dotted names ("layers.0.qkv") to arrays. Checkpoints fill this dict, and device
programs take it as an argument. The nnx module describes the computation, and declares each parameter with its axes,
parts and kind (`Parameter`). `parameters` returns these declarations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.cache.layer import LayerCache
from jaxspec.models import layer_embeddings
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.head import Head, product
from jaxspec.models.mixers import MIXERS
from jaxspec.models.mixers.attention import Tables, rotary_tables
from jaxspec.models.mlps import MLPS
from jaxspec.models.parameters import Parameter, declare
from jaxspec.models.rows import Rows, whole_rows
from jaxspec.models.table import looked_up
from jaxspec.parallel.mailbox import attached
from jaxspec.parallel.placement import Placement
from pallas_kernels.plain import rms_norm
from pallas_kernels.weights import nbytes

Params = Mapping[str, Any]  # parameters by dotted name, each an array or a Weight of pallas_kernels.weights


class Layer(nnx.Module):
    """One layer: the mixer (such as attention) and the MLP that its LayerConfig names.

    entry: width of the input that the mixer reads in place of the residual stream x, already normed; None if the mixer
      reads x.
    """

    input_norm: Any
    qkv: Any

    def __init__(self, config: ModelConfig, index: int, dtype: Any, entry: int | None = None) -> None:
        self.config = config
        self.own = config.layers[index]
        MIXERS[self.own.mixer].declare(self, config, self.own, dtype, entry)
        MLPS[self.own.mlp].declare(self, config, self.own, dtype)

    def mix(
        self,
        x: jax.Array,
        normed: jax.Array | None,
        memory: Any,
        read: Any,
        rows: Rows,
        ropes: Tables,
        backend: Backend,
        **options: Any,
    ) -> tuple[jax.Array, Any]:
        """Compute the layer's first half, its mixer: return (mixed [B,T,_], the layer's cache) for x [B,T,E]."""
        mixer = MIXERS[self.own.mixer]
        mixed: tuple[jax.Array, Any] = mixer.mix(self, x, normed, memory, read, rows, ropes, backend, **options)
        return mixed

    def feed_forward(
        self, x: jax.Array, mixed: jax.Array, backend: Backend, **following: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        """Compute the layer's second half, its MLP: return (x [B,T,E], x normed for the next layer or None).

        The returned x is the given x plus `mixed`, projected, plus the output of the MLP.
        """
        mlp = MLPS[self.own.mlp]
        summed: tuple[jax.Array, jax.Array | None] = mlp.feed_forward(self, x, mixed, backend, **following)
        return summed


def through(
    layers: Sequence[Layer],
    x: jax.Array,
    cache: Iterable[Any],
    rows: Rows,
    backend: Backend,
    *,
    norm: jax.Array | None = None,
    entry: jax.Array | None = None,
    embeddings: Sequence[jax.Array] = (),
) -> tuple[jax.Array, Any, tuple[LayerCache, ...], list[jax.Array]]:
    """Pass x [B,T,E] through these layers; return (x, x normed by `norm` or None, caches, inputs).

    The list `inputs` holds the input of each layer, followed by the output of the last layer.

    cache: caches of the layers that have one, in order; in a pass without a cache, None for each.
    norm: scale of the norm after the last layer, or None.
    entry: normed input that the first layer's mixer reads in place of x, or None.
    embeddings: embeddings [B,T,_] of the tokens for each layer (`layer_embeddings`); empty for none.
    """
    ropes = rotary_tables([layer.own for layer in layers], rows, backend)
    following = [ahead(layer) for layer in layers[1:]] + [{} if norm is None else {"next_norm": norm}]
    if embeddings:
        following = [after | {"embedding": e} for after, e in zip(following, embeddings, strict=True)]
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
        normed = rms_norm(norm, x, layers[0].config.norm_eps)
    written = (memory for layer, memory in zip(layers, memories, strict=True) if layer.own.shares is None)
    return x, normed, tuple(written), inputs


def ahead(layer: Layer) -> dict[str, Any]:
    """Return the parameters of a layer that the MLP kernel of the preceding layer can use.

    They are the layer's input norm and, if the layer has one, its merged matrix of queries, keys and values.
    """
    found: dict[str, Any] = {} if layer.input_norm is None else {"next_norm": layer.input_norm[...]}
    if hasattr(layer, "qkv"):
        found["next_qkv"] = layer.qkv[...]
    return found


class Decoder(Head):
    """A causal language model, run with or without a paged KV cache."""

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
        layer_embeddings.declare(self, c, dtype)
        self.layers = nnx.List([Layer(c, i, dtype) for i in range(c.num_layers)])
        self.norm = declare("norm")(c.width, whole=FAMILIES[c.family].whole_last_norm)
        self.declare_head(c, dtype)

    def __call__(
        self, tokens: jax.Array, cache: Collection[Any], rows: Rows, backend: Backend, taps: tuple[int, ...] = ()
    ) -> tuple[jax.Array, tuple[LayerCache, ...], tuple[jax.Array, ...]]:
        """Pass tokens i32[B,T] through the model; return (hidden, cache, tapped).

        hidden is the output [B,T,E] of the last norm. tapped holds the inputs of the layers `taps`, in that order.

        cache: caches of the layers that have one, in order; in a pass without a cache, None for each.
        rows: positions and cache slots of the tokens.
        taps: indices of layers; the number of layers, L, stands for the input of the last norm.
        """
        trained = None in cache
        x = self.embedded(tokens, backend, differentiable=trained)
        each = layer_embeddings.layer_embeddings(self, tokens, x, backend, differentiable=trained)
        layers = list(self.layers)
        _, hidden, written, inputs = through(layers, x, cache, rows, backend, norm=self.norm[...], embeddings=each)
        scale = self.config.residual_scale
        return hidden, written, tuple(inputs[i] if scale == 1.0 else inputs[i] * scale for i in taps)

    def embedded(self, tokens: jax.Array, backend: Backend, *, differentiable: bool = False) -> jax.Array:
        """Return the input x [B,T,E] of the first layer for tokens i32[B,T]."""
        c = self.config
        table = self.embed[...]
        if differentiable:
            # The gradient of a lookup sums one row for each occurrence of a token id. The sum needs float32.
            table = table.astype(jnp.float32)
        x = looked_up(table, tokens, backend).astype(self.dtype)
        if c.embed_norm:
            x = rms_norm(None, x, c.norm_eps)
        scale = c.embed_scale / c.residual_scale
        if scale != 1.0:
            x = x * jnp.asarray(scale, x.dtype)
        if c.embed_width:
            x = product(x, self.embed_in[...], backend).astype(x.dtype)
        return x


@functools.singledispatch
def module(config: ModelConfig, dtype: Any) -> Any:
    """Return the nnx module that a configuration describes: a Decoder, or the module registered for its class."""
    return Decoder(config, dtype)


@functools.cache
def describe(config: ModelConfig, dtype: str) -> tuple[nnx.GraphDef[Any], dict[Any, Any]]:
    """Return nnx's (graph definition, abstract parameters by path) of a model's module, without allocating arrays."""
    graph, state = nnx.split(nnx.eval_shape(lambda: module(config, jnp.dtype(dtype))))
    return graph, dict(nnx.to_flat_state(state))


def dotted(path: tuple[Any, ...]) -> str:
    """Return the dotted name, such as "layers.0.qkv", of the parameter at a path of nnx."""
    return ".".join(map(str, path))


def bind(config: ModelConfig, params: Params) -> Any:
    """Return the model's module with these parameters. Inside a traced function this costs nothing at run time."""
    graph, abstract = describe(config, compute_dtype(params).name)
    flat = {path: leaf.replace(params[dotted(path)]) for path, leaf in abstract.items()}
    return attached(nnx.merge(graph, nnx.from_flat_state(flat)), params)


def compute_dtype(params: Params) -> Any:
    """Return the dtype of activations: JAX's common dtype of all matrices and tables.

    Matrices may have different dtypes, for example in a draft that reads its target's embedding table.
    """
    return jnp.result_type(*(x.dtype for x in params.values() if len(x.shape) > 1))


def no_cache(config: ModelConfig) -> tuple[None, ...]:
    """Return the argument `cache` of a pass that uses no KV cache: None for each layer that would have one."""
    return (None,) * len(config.cached_layers)


def whole(config: ModelConfig, params: Params, tokens: jax.Array, backend: Backend) -> tuple[Decoder, jax.Array]:
    """Run a causal pass over whole texts without a KV cache, for training; return (bound decoder, hidden [B,T,E]).

    tokens: i32[B,T]; each row begins at position 0.
    """
    decoder = bind(config, params)
    hidden, _, _ = decoder(tokens, no_cache(config), whole_rows(*tokens.shape), backend)
    return decoder, hidden


def parameters(config: ModelConfig, dtype: Any = "float32") -> dict[str, Parameter]:
    """Return the declaration of each parameter, by name.

    dtype: dtype of the weights; norms are always float32 and ids int32 (`declare`).
    """
    _, abstract = describe(config, jnp.dtype(dtype).name)
    return {dotted(path): leaf.declared for path, leaf in abstract.items()}


def abstract_params(config: ModelConfig, dtype: Any, placement: Placement) -> dict[str, Parameter]:
    """Return the shape, dtype, sharding and other facts of each parameter, by name. A checkpoint fills these arrays."""
    return {
        name: dataclasses.replace(p, sharding=placement.of_parameter(p.axes, p.shape))
        for name, p in parameters(config, dtype).items()
    }


def read_by_pass(
    config: ModelConfig, params: Params, *, logits: bool = True, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return the parameters that one pass reads, except those named in `without`.

    An embedding table that is not also the output head is left out, because a pass reads only single rows of it.
    logits=False, as in prefill, leaves the head out, too.
    """
    read = {name for name, p in parameters(config).items() if (logits if p.head else p.kind != "table")}
    return {name: x for name, x in params.items() if name in read and name not in without}


def weight_bytes(config: ModelConfig, params: Params, **which: Any) -> int:
    """Count the bytes of the parameters that one pass reads. which: keyword arguments of `read_by_pass`."""
    return nbytes(read_by_pass(config, params, **which))


def random_params(
    config: ModelConfig,
    dtype: Any,
    placement: Placement,
    seed: int = 0,
    *,
    known: Params | None = None,
    keep: Callable[[str, Parameter, jax.Array], Any] = lambda name, parameter, x: x,
) -> dict[str, Any]:
    """Return random matrices of a plausible scale, and norms of 1, by name, for tests and benchmarks.

    known: parameters to include unchanged instead of random ones.
    keep: function from a parameter's name, declaration and values to what is kept in their place, such as a quantised
      form. It is called before the next parameter is made.
    """
    known = known or {}
    abstract = {name: p for name, p in abstract_params(config, dtype, placement).items() if name not in known}

    def draw(index: int, p: Parameter) -> jax.Array:
        if p.kind == "ids":  # ids of a reduced vocabulary: the target's first ids
            first = np.minimum(np.arange(p.shape[0], dtype=p.dtype), config.head_size)
            ids: jax.Array = jax.device_put(first, p.sharding)
            return ids
        if p.kind == "norm":
            ones: jax.Array = jax.device_put(np.ones(p.shape, p.dtype), p.sharding)
            return ones
        fan_in = p.shape[-1] if p.kind == "table" else p.shape[0]
        return normal(p.shape, p.dtype, p.sharding, fan_in**-0.5)(jax.random.fold_in(jax.random.key(seed), index))

    return {name: keep(name, p, draw(i, p)) for i, (name, p) in enumerate(abstract.items())} | dict(known)


@functools.cache
def normal(shape: tuple[int, ...], dtype: Any, sharding: Any, deviation: float) -> Callable[[jax.Array], jax.Array]:
    """Return a compiled function from a random key to an array of normally distributed numbers.

    Each shape has its own program. One program for all weights would take minutes to compile on a GPU.
    """

    def draw(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * deviation).astype(dtype)

    return jax.jit(draw, out_shardings=sharding)
