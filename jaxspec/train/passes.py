"""What the passes of all methods have in common: what they read, how a layer attends, what they say of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.common.shapes import Array, Bool, Float, Int
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder, Params, bind, no_cache
from jaxspec.models.rows import whole_rows
from pallas_kernels.plain import project
from pallas_kernels.weights import product

FADES = 0.8  # of each draft's share in the loss, to the next: a draft counts only where all before it were accepted


class Said(NamedTuple):
    """Of some passes over the entries of each row.

    hidden [B, entries, passes, E]: what their logits are made of.
    predicts [B, entries]: the place of the token that an entry predicts; at the row's length or beyond, it is none.
    shares [entries, passes]: of their losses in the whole.
    first [entries, passes]: whether it is the first draft of a round, of which the losses are told.
    seen: what the target's logits are made of, where the passes had it computed.
    """

    hidden: Float[Array, "B _ _ E"]
    predicts: Int[Array, "B _"]
    shares: Float[np.ndarray, "_ _"]
    first: Bool[np.ndarray, "_ _"]
    seen: Float[Array, "B T E"] | None = None


def of_tokens_after(ahead: int, hidden: jax.Array, seen: jax.Array | None = None) -> Said:
    """Where an entry of each token predicts the one `ahead` places on, in all passes. The first i entries of the pass i
    have none before them that it could go on from."""
    b, length, k, _ = hidden.shape
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32) + ahead, (b, length))
    shares = np.where(np.arange(length)[:, None] >= np.arange(k), fading(k), 0.0).astype(np.float32)
    first = np.broadcast_to(np.arange(k) == 0, shares.shape)
    return Said(hidden, places, shares, first, seen)


def fading(k: int) -> np.ndarray:
    """f64[k], of sum 1."""
    each = FADES ** np.arange(k)
    return each / each.sum()


def read(
    config: ModelConfig, target: Params, batch: Mapping[str, jax.Array], backend: Backend, taps: tuple[int, ...]
) -> tuple[Decoder, jax.Array, tuple[Any, ...]]:
    """(the target, what left its last norm [B,T,E], what goes into the layers `taps`), of a batch's tokens. Nothing of
    it learns."""
    decoder, tokens = bind(config, target), batch["tokens"]
    if "seen" in batch:  # kept on disk, the taps one beside the other
        return decoder, batch["seen"], tuple(jnp.split(batch["tapped"], len(taps), axis=-1)) if taps else ()
    rows = whole_rows(*tokens.shape)
    hidden, _, tapped = decoder(tokens, no_cache(config), rows, backend, taps=taps)
    return decoder, *lax.stop_gradient((hidden, tapped))


def projected(layer: Any, normed: jax.Array, tables: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    """query [B,T,H,D], key and value [B,T,G,D] of what a layer attends with; tables: rotary ones, of its places."""
    c = layer.config
    bias = layer.qkv_bias[...] if c.qkv_bias else None
    q_norm, k_norm = (layer.q_norm[...], layer.k_norm[...]) if c.qk_norm else (None, None)
    return project(product(normed, layer.qkv[...]), bias, q_norm, k_norm, *tables, c.num_kv_heads, c.norm_eps)
