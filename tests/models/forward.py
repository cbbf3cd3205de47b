"""A whole sequence through the paged decoder, in chunks of any lengths."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.pages import allocate
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import bind, compute_dtype
from jaxspec.models.paged import cache_layout
from jaxspec.models.rows import Rows
from jaxspec.parallel.placement import make_placement
from pallas_kernels.device import here

PAGE_SIZE = 8


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def step(config: ModelConfig, params, pages, tokens, start, block_table, placement=None):
    """tokens i32[B,T] at positions start... -> (logits f32[B,T,V], pages)."""
    b, t = tokens.shape
    positions = jnp.broadcast_to(start + jnp.arange(t, dtype=jnp.int32), (b, t))
    slots = jnp.take_along_axis(block_table, positions // PAGE_SIZE, axis=1) * PAGE_SIZE + positions % PAGE_SIZE
    rows = Rows(positions, slots.reshape(-1), block_table, jnp.full((b,), start + t, jnp.int32))
    decoder, backend = bind(config, params), Backend(here(), placement)
    hidden, pages, _ = decoder(tokens, pages, rows, backend)
    return decoder.logits(hidden, backend), pages


def run(config: ModelConfig, params, tokens: np.ndarray, chunks: Sequence[int], placement=None) -> np.ndarray:
    """tokens i32[B,T], cut into chunks that add up to T -> logits f32[B,T,V], over shuffled pages.

    placement: that of the parameters; None for one device.
    """
    assert sum(chunks) == tokens.shape[1]
    b, n = tokens.shape[0], -(-tokens.shape[1] // PAGE_SIZE)
    dtype = compute_dtype(params)
    layout = cache_layout(config, page_size=PAGE_SIZE, num_pages=b * n, dtype=dtype, platform=jax.default_backend())
    pages = allocate(layout, placement or make_placement())
    block_table = jnp.asarray(np.random.default_rng(0).permutation(b * n).reshape(b, n), jnp.int32)
    parts, start = [], 0
    for length in chunks:
        chunk = jnp.asarray(tokens[:, start : start + length], jnp.int32)
        logits, pages = step(config, params, pages, chunk, jnp.int32(start), block_table, placement)
        parts.append(np.asarray(logits))
        start += length
    return np.concatenate(parts, axis=1)
