"""Embeddings per layer, as in Gemma 4: for each token, every layer reads a short embedding of its own."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.head import product
from jaxspec.models.parameters import declare as declared
from jaxspec.models.table import looked_up
from pallas_kernels.plain import rms_norm


def declare(decoder: Any, config: ModelConfig, dtype: Any) -> None:
    """Add the parameters of the embeddings to a Decoder, if its model has them."""
    if config.layer_embed_width:
        width = config.num_layers * config.layer_embed_width
        decoder.layer_embed = declared("table", dtype)(config.vocab_size, width, axes=("vocab", None))
        decoder.layer_embed_in = declared("matrix", dtype)(config.width, width)
        decoder.layer_embed_norm = declared("norm")(config.layer_embed_width)


def layer_embeddings(
    decoder: Any, tokens: jax.Array, x: jax.Array, backend: Backend, *, differentiable: bool = False
) -> list[jax.Array]:
    """Return the embeddings [B,T,_] of tokens i32[B,T], one array for each layer; none if the model has none.

    An embedding is the mean of a row of a table and a projection of the token's main embedding, times sqrt(2).

    x: input [B,T,E] of the first layer.
    differentiable: whether the table is read in float32, as in `Decoder.embedded`.
    """
    c = decoder.config
    if not c.layer_embed_width:
        return []
    table = decoder.layer_embed[...]
    rows = looked_up(table.astype(jnp.float32) if differentiable else table, tokens, backend).astype(x.dtype)
    projected = product(x, decoder.layer_embed_in[...], backend).astype(x.dtype)
    own, shared = (y.reshape(*y.shape[:-1], c.num_layers, c.layer_embed_width) for y in (rows, projected))
    own = own * jnp.asarray(math.sqrt(c.layer_embed_width), x.dtype)
    shared = shared * jnp.asarray(c.width**-0.5, x.dtype)
    mixed = (rms_norm(decoder.layer_embed_norm[...], shared, c.norm_eps) + own) * jnp.asarray(2**-0.5, x.dtype)
    return [mixed[..., i, :] for i in range(c.num_layers)]
