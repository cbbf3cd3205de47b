"""The gated MLP of Gemma 4. The token's embedding for this layer follows it, then a factor of the layer."""

from __future__ import annotations

from typing import Any

import jax

from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.head import product
from jaxspec.models.layer_config import LayerConfig
from jaxspec.models.mlps import gated
from jaxspec.models.parameters import declare as declared
from pallas_kernels.plain import activate, rms_norm


def declare(layer: Any, config: ModelConfig, own: LayerConfig, dtype: Any) -> None:
    """Add the parameters of the MLP to a Layer. own: configuration of the layer."""
    gated.declare(layer, config, own, dtype)
    matrix = declared("matrix", dtype)
    norm = declared("norm")
    if config.layer_embed_width:
        layer.embed_gate = matrix(config.width, config.layer_embed_width)
        layer.embed_out = matrix(config.layer_embed_width, config.width)
        layer.embed_norm = norm(config.width)
    layer.layer_scale = norm(1)


def feed_forward(
    layer: Any, x: jax.Array, mixed: jax.Array, backend: Backend, embedding: jax.Array | None = None, **following: Any
) -> tuple[jax.Array, None]:
    """Compute a layer's second half: return (x [B,T,E], None) for x and mixed [B,T,H*D].

    embedding: embedding [B,T,_] of each token for this layer; None for a model without such embeddings.
    following: parameters of the next layer. They are not used, because the kernel of the gated MLP would norm x before
      the embedding is added.
    """
    c = layer.config
    x, _ = gated.feed_forward(layer, x, mixed, backend)
    if embedding is not None:
        gate = activate(c.activation, product(x, layer.embed_gate[...], backend).astype(x.dtype))
        out = product(gate * embedding, layer.embed_out[...], backend).astype(x.dtype)
        x = x + rms_norm(layer.embed_norm[...], out, c.norm_eps)
    return x * layer.layer_scale[...].astype(x.dtype), None
