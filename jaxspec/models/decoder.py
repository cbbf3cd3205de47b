"""One decoder for every family, composed by ModelConfig.

Parameters live in a flat dict, dotted name -> array ("layers.0.qkv"), which is what programs take as argument,
checkpoints fill. The nnx module is the description of the computation, and of its parameters: what else has to be known
of one is said where it is declared, and read by `parameters`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import (
    Backend,
    Rows,
    attend,
    attend_densely,
    matmul_precision,
    rotary_tables,
)
from jaxspec.models.parameters import Kind, Parameter
from jaxspec.parallel.mesh import param_sharding, sharding
from pallas_kernels.feed_forward import feed_forward
from pallas_kernels.likeliest_token import likeliest_token
from pallas_kernels.plain import likeliest, rms_norm
from pallas_kernels.streamed import linear, once

Params = Mapping[str, jax.Array]


class Vocabulary(NamedTuple):
    """The ids that a draft can propose, where these are only some of the target's V, the frequent ones. It reads all.

    d2t i32[_]: the target's id of each of its own.
    t2d i32[V]: its own id of each of the target's; of those that it lacks, as many as it has.
    """

    d2t: jax.Array
    t2d: jax.Array


def declare(kind: Kind, dtype: Any = None) -> Callable[..., nnx.Variable]:
    """shape, and what else `Parameter` holds -> a variable of that kind, which knows it. All have dtype but norms and
    ids: norms are small, and Gemma's 1 + w needs the bits."""
    own = {"norm": jnp.float32, "ids": jnp.int32}.get(kind, dtype)

    def variable(*shape: int, axes: tuple[str | None, ...] = (), parts: Mapping[str, int] | None = None, **known: bool):
        axes, merged = axes or (None,) * len(shape), tuple((parts or {}).items())
        declared = Parameter(shape, jnp.dtype(own), kind, axes, merged, **known)
        return (nnx.Param if declared.trained else nnx.Variable)(jnp.zeros(shape, own), declared=declared)

    return variable


class Layer(nnx.Module):
    """One transformer block."""

    def __init__(self, config: ModelConfig, index: int, dtype: Any) -> None:
        c = config
        matrix, norm = declare("matrix", dtype), declare("norm")
        self.config, self.window = c, c.windows[index]
        self.input_norm = norm(c.width)
        self.qkv = matrix(c.width, c.qkv_width, axes=(None, "heads"), parts=c.merged["qkv"])
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

    def __call__(self, x, normed, pages, rows: Rows, ropes, backend: Backend, **behind: jax.Array):
        """x [B,T,E] -> (x, the same by next_norm or None, pages). normed: x by this layer's norm, or None. behind:
        next_norm and next_qkv, of the layer behind this one; behind the last there is the model's norm."""
        c = self.config
        mixed, pages = self.attention(x, normed, pages, rows, ropes, backend)
        post: dict[str, Any] = {}
        if c.sandwich_norm:
            names = ("post_attention_norm", "post_mlp_norm")
            post = {name: getattr(self, name)[...] for name in names}
        weights: dict[str, Any] = {"out": self.out[...], "gate_up": self.gate_up[...], "down": self.down[...]}
        options: dict[str, Any] = {"eps": c.norm_eps, "activation": c.activation, "block": c.merged["gate_up"]["gate"]}
        weights |= {"norm": self.mlp_norm[...], **behind}
        x, normed = feed_forward(x, mixed, **weights, **post, **options, **backend.how(cut=True))
        return x, normed, pages

    def attention(self, x, normed, pages, rows: Rows, ropes, backend: Backend):
        c = self.config
        used = {"norm": self.input_norm, "qkv": self.qkv, "next_out": self.out}
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
        return attend(x, weights, axes, pages, rows, tables, backend, **options)


class Decoder(nnx.Module):
    """A causal language model over paged caches."""

    def __init__(self, config: ModelConfig, dtype: Any) -> None:
        self.config = config
        c, table, matrix, ids = config, declare("table", dtype), declare("matrix", dtype), declare("ids")
        table_shape, borrowed = (c.vocab_size, c.embed_width or c.width), c.embed_width is not None
        self.embed = table(*table_shape, axes=("vocab", None), head=c.tied, borrowed=borrowed)
        if c.embed_width:
            self.embed_in = matrix(c.embed_width, c.width)
        if c.reduced_vocab_size:
            self.d2t, self.t2d = ids(c.head_size), ids(c.vocab_size)
        self.layers = nnx.List([Layer(c, i, dtype) for i in range(c.num_layers)])
        self.norm = declare("norm")(c.width)
        if not c.tied:
            self.head = matrix(c.width, c.head_size - c.rare_vocab_size, axes=(None, "vocab"), head=True)
        if c.rare_vocab_size:
            self.rare_in = matrix(c.width, c.rare_width, head=True)
            self.rare_head = matrix(c.rare_width, c.rare_vocab_size, axes=(None, "vocab"), head=True)

    @property
    def vocabulary(self) -> Vocabulary | None:
        return Vocabulary(self.d2t[...], self.t2d[...]) if self.config.reduced_vocab_size else None

    def __call__(self, tokens, pages, rows: Rows, backend: Backend, taps: tuple[int, ...] = ()):
        """tokens i32[B,T] -> (hidden [B,T,E] by the last norm, pages, hidden states entering layers `taps`).

        pages: of each layer, or None for a pass without a cache.
        """
        c = self.config
        # clip: a draft with fewer ids than the target may be shown one it lacks, and the default would make it NaN.
        table = self.embed[...]
        if None in pages:  # the gradient of a lookup adds up as many rows as an id occurs: in float32
            x = jnp.take(table.astype(jnp.float32), tokens, axis=0, mode="clip").astype(table.dtype)
        else:
            x = jnp.take(table, tokens, axis=0, mode="clip")
        x = x * jnp.asarray(c.embed_scale, x.dtype) if c.embed_scale != 1.0 else x
        if c.embed_width:
            x = product(x, self.embed_in[...], backend).astype(x.dtype)
        tables = functools.partial(once, rotary_tables) if backend.streams else rotary_tables
        ropes = {r: tables(r, c.head_dim, rows.positions) for r in {c.rope, c.local_rope} if r is not None}
        behind = [{"next_norm": layer.input_norm[...], "next_qkv": layer.qkv[...]} for layer in list(self.layers)[1:]]
        behind.append({"next_norm": self.norm[...]})
        normed, new_pages, tapped = None, [], []
        for i, (layer, layer_pages, next_weights) in enumerate(zip(self.layers, pages, behind, strict=True)):
            if i in taps:
                tapped.append(x)
            x, normed, layer_pages = layer(x, normed, layer_pages, rows, ropes, backend, **next_weights)
            new_pages.append(layer_pages)
        hidden = rms_norm(self.norm[...], x, c.norm_eps) if normed is None else normed
        return hidden, tuple(new_pages), tuple(tapped)

    def logits(self, x, backend: Backend):
        """Hidden states x [..., E] -> logits f32[..., V], replicated; of a reduced vocabulary over its own ids."""
        c = self.config
        parts = [product(x, self.embed[...], backend, 1) if c.tied else product(x, self.head[...], backend)]
        if c.rare_vocab_size:
            few = product(x, self.rare_in[...], backend).astype(x.dtype)
            parts.append(product(few, self.rare_head[...], backend))
        if backend.mesh is not None and backend.mesh.size > 1:
            parts = [gathered(logits, backend.mesh) for logits in parts]
        logits = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        if cap := c.logit_soft_cap:
            logits = cap * jnp.tanh(logits / cap)
        return logits

    def likeliest(self, x, backend: Backend, vocab_size: int | None = None):
        """x [..., E] -> the id i32[...] of the largest logit, of the first vocab_size; of a reduced vocabulary, what
        that id is in the target's."""
        c = self.config
        # On CPU the table is streamed, over several devices it is cut.
        if c.tied and not c.logit_soft_cap and backend.alone and not backend.streams:
            return likeliest_token(x, self.embed[...], num_ids=vocab_size, **backend.how())
        found = likeliest(self.logits(x, backend)[..., :vocab_size])
        return jnp.take(self.d2t[...], found, mode="clip") if c.reduced_vocab_size else found


def product(x: jax.Array, weights: jax.Array, backend: Backend, axis: int = 0) -> jax.Array:
    """x [..., E] with weights that have E as their axis `axis`, in float32."""
    if backend.streams and x.dtype == jnp.float32:
        return linear(weights.T if axis else weights, x)
    return lax.dot_general(
        x,
        weights,
        (((x.ndim - 1,), (axis,)), ((), ())),
        precision=matmul_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )


def gathered(logits: jax.Array, mesh: Mesh) -> jax.Array:
    """Logits [..., V], whole on every device.

    They are first asked for in the parts that the devices compute, or else the compiler gathers the weights instead;
    and as a table, since the TPU compiler pads a third axis to many times its size.
    """
    table = logits.reshape(-1, logits.shape[-1])
    parts = param_sharding(mesh, (None, "vocab"), table.shape)
    for placed in (parts, sharding(mesh)):
        table = lax.with_sharding_constraint(table, placed)
    return table.reshape(logits.shape)


@functools.cache
def describe(config: ModelConfig, dtype: str) -> tuple[nnx.GraphDef, dict]:
    """(graph definition, path -> abstract parameter) of a Decoder, without allocating it."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, jnp.dtype(dtype))))
    return graph, dict(nnx.to_flat_state(state))


def dotted(path: tuple) -> str:
    return ".".join(map(str, path))


def bind(config: ModelConfig, params: Params) -> Decoder:
    """The decoder over these parameters. Call it inside the traced function: it costs nothing at run time."""
    graph, abstract = describe(config, params["embed"].dtype.name)
    flat = {path: leaf.replace(params[dotted(path)]) for path, leaf in abstract.items()}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def whole(config: ModelConfig, params: Params, tokens: jax.Array, backend: Backend) -> tuple[Decoder, jax.Array]:
    """A causal pass over whole rows without a cache, for training: tokens i32[B,T], rows from position 0 ->
    (the bound decoder, hidden [B,T,E])."""
    decoder = bind(config, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _, _ = decoder(tokens, (None,) * config.num_layers, Rows(positions), backend)
    return decoder, hidden


def parameters(config: ModelConfig, dtype: Any = "float32") -> dict[str, Parameter]:
    """Name -> what the module says of each parameter. dtype: of most."""
    _, abstract = describe(config, jnp.dtype(dtype).name)
    return {dotted(path): leaf.declared for path, leaf in abstract.items()}


def abstract_params(config: ModelConfig, dtype: Any, mesh: Mesh) -> dict[str, Parameter]:
    """The same, each with where it lies: what a checkpoint has to fill."""
    lies = lambda p: dataclasses.replace(p, sharding=param_sharding(mesh, p.axes, p.shape))
    return {name: lies(p) for name, p in parameters(config, dtype).items()}


def weight_bytes(config: ModelConfig, params: Params, *, logits: bool = True) -> int:
    """Read by one pass. Of an embedding table that is not the head, a pass reads single rows only; without logits
    (prefill) it reads neither head nor table."""
    read = {name for name, p in parameters(config).items() if (logits if p.head else p.kind != "table")}
    shapes = jax.eval_shape(dict, params)  # not the arrays, which may have to be turned to be seen
    return sum(w.size * w.dtype.itemsize for name, w in shapes.items() if name in read)


def random_params(
    config: ModelConfig, dtype: Any, mesh: Mesh, seed: int = 0, *, known: Params | None = None
) -> dict[str, jax.Array]:
    """Random weights of a plausible scale, for tests and benchmarks, beside those that are known."""
    abstract = {name: p for name, p in abstract_params(config, dtype, mesh).items() if name not in (known or {})}

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
