"""Functions and types that the training passes of all methods share: reading the target, projections, outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

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

# Ratio of a draft token's weight in the loss to the previous draft token's. It is below 1, because a draft token is
# of use only if all before it were accepted.
DECAY = 0.8


Batch = Mapping[str, jax.Array]  # arrays by name; see `jaxspec.train.loss.loss_sums`


class OutputHead(Protocol):
    """A module that computes logits from hidden states."""

    def logits(self, x: jax.Array, backend: Backend, /) -> jax.Array:
        """Return the logits f32[..., V] of hidden states x [..., E]."""
        ...


class PassOutputs(NamedTuple):
    """The outputs of a method's passes over a batch. An entry is a position at which the passes make a prediction.

    hidden [B, entries, passes, E]: hidden states from which the logits are computed.
    predicts [B, entries]: position of the token that an entry predicts. It is the row's length or more if there is no
      such token.
    shares [entries, passes]: weight of each prediction's loss in the total.
    first [entries, passes]: True for predictions of the first draft of a round. Metrics cover only these.
    seen: the target's hidden states after its last norm, or None if the passes did not compute them.
    """

    hidden: Float[Array, "B _ _ E"]
    predicts: Int[Array, "B _"]
    shares: Float[np.ndarray, "_ _"]
    first: Bool[np.ndarray, "_ _"]
    seen: Float[Array, "B T E"] | None = None


def per_token_outputs(ahead: int, hidden: jax.Array, seen: jax.Array | None = None) -> PassOutputs:
    """Return the outputs of passes that make a prediction at every token.

    ahead: number of positions from a token to the token predicted at it.
    hidden: hidden states [B,T,passes,E].
    seen: as in PassOutputs.

    In pass i (from 0) the first i positions get share 0, because a prediction of that pass needs i positions before its
    own.
    """
    b, length, k, _ = hidden.shape
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32) + ahead, (b, length))
    shares = np.where(np.arange(length)[:, None] >= np.arange(k), draft_shares(k), 0.0).astype(np.float32)
    first = np.broadcast_to(np.arange(k) == 0, shares.shape)
    return PassOutputs(hidden, places, shares, first, seen)


def draft_shares(k: int) -> np.ndarray:
    """Return each draft token's weight in the loss, f64[k]. The weights sum to 1."""
    each: np.ndarray = DECAY ** np.arange(k)
    shares: np.ndarray = each / each.sum()
    return shares


def read(
    config: ModelConfig, target: Params, batch: Batch, backend: Backend, taps: tuple[int, ...]
) -> tuple[Decoder, jax.Array, tuple[Any, ...]]:
    """Return the target's decoder, its hidden states after the last norm [B,T,E], and the inputs of the layers `taps`.

    The hidden states and inputs are taken from the batch if it holds them, else computed from its tokens. No gradient
    flows into them.
    """
    decoder, tokens = bind(config, target), batch["tokens"]
    if "seen" in batch:  # read from disk, where the inputs of the layers `taps` are concatenated
        tapped = tuple(jnp.split(batch["tapped"], len(taps), axis=-1)) if taps else ()
        return decoder, batch["seen"], tapped
    rows = whole_rows(*tokens.shape)
    hidden, _, tapped = decoder(tokens, no_cache(config), rows, backend, taps=taps)
    return decoder, *lax.stop_gradient((hidden, tapped))


def projected(
    layer: Any, normed: jax.Array, tables: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a layer's query [B,T,H,D], key and value [B,T,G,D].

    normed: the normed input of the layer. tables: rotary tables of the input's positions.
    """
    c = layer.config
    bias = layer.qkv_bias[...] if c.qkv_bias else None
    q_norm, k_norm = (layer.q_norm[...], layer.k_norm[...]) if c.qk_norm else (None, None)
    heads = product(normed, layer.qkv[...])
    query, key, value = project(heads, bias, q_norm, k_norm, *tables, c.num_kv_heads, c.norm_eps)
    return query, key, value
