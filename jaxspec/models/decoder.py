"""One decoder for every family, composed by ModelConfig.

Parameters live in a flat dict, dotted name -> array ("layers.0.qkv"), which is what programs take as argument,
checkpoints fill and shardings are looked up for. The nnx module is the description of the computation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import (
    Backend,
    Rows,
    attend,
    matmul_precision,
    rotary_tables,
)
from jaxspec.parallel.mesh import param_sharding, sharding
from pallas_kernels.feed_forward import feed_forward
from pallas_kernels.feed_forward.reference import rms_norm

Params = Mapping[str, jax.Array]


class Layer(nnx.Module):
    """One transformer block. Norms are float32: they are small, and Gemma's 1 + w needs the bits."""

    def __init__(self, config: ModelConfig, index: int, dtype: Any) -> None:
        c = config
        weight = lambda *shape: nnx.Param(jnp.zeros(shape, dtype))
        norm = lambda size: nnx.Param(jnp.zeros((size,), jnp.float32))
        self.config, self.window = c, c.windows[index]
        self.input_norm = norm(c.width)
        self.qkv = weight(c.width, c.qkv_width)
        if c.qkv_bias:
            self.qkv_bias = weight(c.qkv_width)
        if c.qk_norm:
            self.q_norm, self.k_norm = norm(c.head_dim), norm(c.head_dim)
        self.out = weight(c.num_heads * c.head_dim, c.width)
        if c.sandwich_norm:
            self.post_attention_norm, self.post_mlp_norm = norm(c.width), norm(c.width)
        self.mlp_norm = norm(c.width)
        self.gate_up = weight(c.width, 2 * c.mlp_width)
        self.down = weight(c.mlp_width, c.width)

    def __call__(self, x, pages, rows: Rows, ropes, backend: Backend):
        c = self.config
        mixed, pages = self.attention(x, pages, rows, ropes, backend)
        post: dict[str, Any] = {}
        if c.sandwich_norm:
            names = ("post_attention_norm", "post_mlp_norm")
            post = {name: getattr(self, name)[...] for name in names}
        weights: dict[str, Any] = {"out": self.out[...], "gate_up": self.gate_up[...], "down": self.down[...]}
        options: dict[str, Any] = {"eps": c.norm_eps, "activation": c.activation, "block": c.merged["gate_up"]["gate"]}
        x = feed_forward(x, mixed, norm=self.mlp_norm[...], **weights, **post, **options, **backend.dense)
        return x, pages

    def attention(self, x, pages, rows: Rows, ropes, backend: Backend):
        c = self.config
        weights = {"norm": self.input_norm[...], "qkv": self.qkv[...]}
        if c.qkv_bias:
            weights["bias"] = self.qkv_bias[...]
        if c.qk_norm:
            weights |= {"q_norm": self.q_norm[...], "k_norm": self.k_norm[...]}
        tables = ropes[c.local_rope if self.window and c.local_rope else c.rope]
        options = {"eps": c.norm_eps, "scale": c.query_scale, "window": self.window, "soft_cap": c.soft_cap}
        return attend(x, weights, pages, rows, tables, backend, **options)


class Decoder(nnx.Module):
    """A causal language model over paged caches."""

    def __init__(self, config: ModelConfig, dtype: Any) -> None:
        self.config = config
        self.embed = nnx.Param(jnp.zeros((config.vocab_size, config.width), dtype))
        self.layers = nnx.List([Layer(config, i, dtype) for i in range(config.num_layers)])
        self.norm = nnx.Param(jnp.zeros((config.width,), jnp.float32))
        if not config.tied:
            self.head = nnx.Param(jnp.zeros((config.width, config.vocab_size), dtype))

    def __call__(self, tokens, pages, rows: Rows, backend: Backend, taps: tuple[int, ...] = ()):
        """tokens i32[B,T] -> (hidden [B,T,E] before the last norm, pages, hidden states entering layers `taps`)."""
        c = self.config
        # clip: a draft with fewer ids than the target may be shown one it lacks, and the default would make it NaN.
        x = jnp.take(self.embed[...], tokens, axis=0, mode="clip")
        x = x * jnp.asarray(c.embed_scale, x.dtype) if c.embed_scale != 1.0 else x
        ropes = {r: rotary_tables(r, c.head_dim, rows.positions) for r in {c.rope, c.local_rope} if r is not None}
        new_pages, tapped = [], []
        for i, (layer, layer_pages) in enumerate(zip(self.layers, pages, strict=True)):
            if i in taps:
                tapped.append(x)
            x, layer_pages = layer(x, layer_pages, rows, ropes, backend)
            new_pages.append(layer_pages)
        return x, tuple(new_pages), tuple(tapped)

    def logits(self, hidden, backend: Backend):
        """hidden [..., E] -> logits f32[..., V], replicated."""
        x = rms_norm(self.norm[...], hidden, self.config.norm_eps)
        weights, axis = (self.embed[...], 1) if self.config.tied else (self.head[...], 0)
        logits = lax.dot_general(
            x,
            weights,
            (((x.ndim - 1,), (axis,)), ((), ())),
            precision=matmul_precision(x.dtype),
            preferred_element_type=jnp.float32,
        )
        if backend.mesh is not None and backend.mesh.size > 1:
            logits = gathered(logits, backend.mesh)
        if cap := self.config.logit_soft_cap:
            logits = cap * jnp.tanh(logits / cap)
        return logits


def gathered(logits: jax.Array, mesh: Mesh) -> jax.Array:
    """Logits [..., V], whole on every device.

    They are first asked for in the parts that the devices compute, or else the compiler gathers the weights instead;
    and as a table, since the TPU compiler pads a third axis to many times its size.
    """
    table = logits.reshape(-1, logits.shape[-1])
    parts = param_sharding(mesh, "head", table.shape)
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


def abstract_params(config: ModelConfig, dtype: Any, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Name -> shape, dtype and sharding of every parameter: what a checkpoint has to fill."""
    _, abstract = describe(config, jnp.dtype(dtype).name)
    shapes = {dotted(path): leaf.get_value() for path, leaf in abstract.items()}
    return {
        name: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=param_sharding(mesh, name, s.shape))
        for name, s in shapes.items()
    }


def random_params(config: ModelConfig, dtype: Any, mesh: Mesh, seed: int = 0) -> dict[str, jax.Array]:
    """Random weights of a plausible scale, for tests and benchmarks."""
    abstract = abstract_params(config, dtype, mesh)

    def leaf(index: int, name: str, s: jax.ShapeDtypeStruct) -> jax.Array:
        if name.endswith("norm"):
            return jnp.ones(s.shape, s.dtype)
        fan_in = s.shape[-1] if name == "embed" else s.shape[0]
        key = jax.random.fold_in(jax.random.key(seed), index)
        return (jax.random.normal(key, s.shape, jnp.float32) * fan_in**-0.5).astype(s.dtype)

    init = lambda: {name: leaf(i, name, s) for i, (name, s) in enumerate(abstract.items())}
    return jax.jit(init, out_shardings={name: s.sharding for name, s in abstract.items()})()
