"""Training passes of heads (drafts that read the target's hidden states) that draft one token after another.

The first pass reads the target's hidden states. Each later pass reads the head's own output of the previous pass, in
training as in decoding ("training-time test").

Source: Li et al., https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.common.shapes import Array, Float
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, bind
from jaxspec.models.draft_spec import HeadConfig
from jaxspec.models.mixers.attention import rotary_tables
from jaxspec.models.rows import Rows, whole_rows
from jaxspec.train.passes import Batch, PassOutputs, per_token_outputs, projected, read
from pallas_kernels.plain import rms_norm

PastKeysValues = list[tuple[jax.Array, jax.Array]]  # keys and values [B,T,G,D] of one layer, from each pass so far
# Function enter(head, token, feature, backend) that prepares a pass's input. token [B,T,E] is the embedding of each
# position's next token, feature [B,T,E] the hidden state that the head reads there. It returns the residual stream
# [B,T,E] and the normed input [B,T,_] of the first layer's attention.
Enter = Callable[[Any, jax.Array, jax.Array, Backend], tuple[jax.Array, jax.Array]]


def passes(
    enter: Enter,
    configs: tuple[ModelConfig, HeadConfig],
    draft: Params,
    target: Params,
    batch: Batch,
    backend: Backend,
    k: int,
    *,
    carries_normed: bool,
) -> PassOutputs:
    """Run the head's k passes over a batch. Pass i predicts draft token i of a round, from every position.

    The first pass reads the target's hidden states. Each later pass reads, at every position, the previous pass's
    output at the position before.

    enter: see `Enter`. carries_normed: whether a pass's output is taken after the head's last norm.
    """
    config = configs[1]
    head: Any = bind(config, draft)
    decoder, hidden, tapped = read(configs[0], target, batch, backend, config.spec.taps)
    dtype = head.fc[...].dtype
    feature = head.features(hidden.astype(dtype), [x.astype(dtype) for x in tapped], backend)
    following = jnp.roll(batch["tokens"], -1, axis=1)
    token = lax.stop_gradient(decoder.embedded(following, backend)).astype(dtype)
    rows = whole_rows(*following.shape)
    seen: list[PastKeysValues] = [[] for _ in head.layers]
    outputs = []
    for _ in range(k):
        x, entry = enter(head, token, feature, backend)
        x, normed = one_pass(head, x, entry, seen, rows, backend)
        outputs.append(normed)
        carried = normed if carries_normed else x
        feature = jnp.concatenate([feature[:, :1], carried[:, :-1]], axis=1)
    return per_token_outputs(2, jnp.stack(outputs, axis=2), hidden)


def one_pass(
    head: Any,
    x: Float[Array, "B T E"],
    entry: Float[Array, "B T _"],
    seen: Sequence[PastKeysValues],
    rows: Rows,
    backend: Backend,
) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"]]:
    """Run the residual stream x through the head's layers. Return it before and after the head's last norm.

    entry: the normed input of the first layer's attention. seen: a list for each layer, to which this pass's keys and
      values are appended.
    """
    c, normed = head.config, entry
    norms = [*(layer.input_norm[...] for layer in head.layers[1:]), head.norm[...]]
    for layer, known, norm in zip(head.layers, seen, norms, strict=True):
        query, key, value = projected(
            layer, normed, rotary_tables(c.layers, rows, backend)[c.layers[0].rope, c.head_dim]
        )
        known.append((key, value))
        x, normed = layer.feed_forward(x, attend(query, known, c), backend, next_norm=norm)
        normed = rms_norm(norm, x, c.norm_eps) if normed is None else normed
    return x, normed


def attend(query: Float[Array, "B T H D"], seen: PastKeysValues, config: HeadConfig) -> Float[Array, "B T _"]:
    """Return the attention output [B,T,H*D] of the newest pass in one layer.

    query: queries of the newest pass. seen: keys and values of all passes, the newest included.

    In decoding, the draft cache holds the first pass's keys at all positions but the last ones. Each later pass wrote
    one of those. So the query at position t of the newest pass, whose number from 0 is `lag`, sees the first pass at
    positions up to t - lag, and each later pass i at position t - (lag - i) only.
    """
    b, t, _, d = query.shape
    key, value = seen[0]
    lag = len(seen) - 1
    query = query.reshape(b, t, key.shape[2], -1, d)
    place = jnp.arange(t)
    scores = jnp.einsum("btgnd,bsgd->bgnts", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(place[None, :] <= place[:, None] - lag, scaled(scores, config), -jnp.inf)
    later = []  # for each later pass: its keys and values, shifted to the query that sees them, and the shift
    for i, (later_key, later_value) in enumerate(seen[1:], start=1):
        by = lag - i
        later.append((jnp.roll(later_key, by, axis=1), jnp.roll(later_value, by, axis=1), by))
    for own_key, _, by in later:
        score = jnp.einsum("btgnd,btgd->bgnt", query, own_key, preferred_element_type=jnp.float32)
        # The first `by` keys are masked, because jnp.roll took them from the end.
        score = jnp.where(place >= by, scaled(score, config), -jnp.inf)
        scores = jnp.concatenate([scores, score[..., None]], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    mixed = jnp.einsum("bgnts,bsgd->btgnd", weights[..., :t], value)
    for i, (_, own_value, _) in enumerate(later):
        mixed += jnp.einsum("bgnt,btgd->btgnd", weights[..., t + i], own_value)
    return mixed.reshape(b, t, -1)


def scaled(scores: Float[Array, "*rest"], config: HeadConfig) -> Float[Array, "*rest"]:
    """Return query-key products in the form that the softmax takes: scaled, and soft-capped if the model does so."""
    scores = scores * config.query_scale
    return config.soft_cap * jnp.tanh(scores / config.soft_cap) if config.soft_cap else scores
