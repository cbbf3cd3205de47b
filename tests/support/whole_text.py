"""Logits of whole texts in one compiled pass: without it, each operation is compiled by itself."""

from __future__ import annotations

import functools

import jax

from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import whole


@functools.partial(jax.jit, static_argnums=(0, 3))
def whole_logits(config: ModelConfig, params, tokens, backend: Backend) -> jax.Array:
    """tokens i32[B,T] -> logits f32[B,T,V]."""
    decoder, hidden = whole(config, params, tokens, backend)
    return decoder.logits(hidden, backend)
