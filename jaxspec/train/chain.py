"""Training passes of heads that draft one token after another.

Each pass reads the head's own output of the previous pass, in training as in a round ("training-time test").

Source: Li et al., https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.models.decoder import bind
from jaxspec.models.mixers.attention import rotary_tables
from jaxspec.models.rows import Rows, whole_rows
from jaxspec.train.passes import PassOutputs, per_token_outputs, projected, read
from pallas_kernels.plain import rms_norm

PastKeysValues = list[tuple[jax.Array, jax.Array]]  # one layer's keys and values [B,T,G,D], of each pass so far
# enter(head, embedding of each entry's next token [B,T,E], its feature [B,T,E], backend) returns the residual stream x
# [B,T,E] and the normed input of the first layer's attention [B,T,_].
Enter = Callable[[Any, jax.Array, jax.Array, Any], tuple[jax.Array, jax.Array]]


def passes(enter: Enter, configs, draft, target, batch, backend, k: int, *, carries_normed: bool) -> PassOutputs:
    """Run the k passes that propose k drafts.

    The first pass reads the target's features. Each later pass reads, at every entry, the previous pass's output at the
    entry before. carries_normed: whether that output is taken after the head's last norm.
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


def one_pass(head, x, entry, seen: Sequence[PastKeysValues], rows: Rows, backend):
    """Run x [B,T,E] through the head's layers; return it before and after the head's last norm.

    entry [B,T,_] is the normed input of the first layer's attention. Each layer's keys and values are appended to its
    list in `seen`.
    """
    c, normed = head.config, entry
    norms = [*(layer.input_norm[...] for layer in head.layers[1:]), head.norm[...]]
    for layer, known, norm in zip(head.layers, seen, norms, strict=True):
        query, key, value = projected(layer, normed, rotary_tables(c.layers, rows, backend)[c.rope, c.head_dim])
        known.append((key, value))
        x, normed = layer.feed_forward(x, attend(query, known, c), backend, next_norm=norm)
        normed = rms_norm(norm, x, c.norm_eps) if normed is None else normed
    return x, normed


def attend(query, seen, config):
    """Return the attention output [B,T,H*D] of the last pass.

    query [B,T,H,D]: of the last pass. seen: keys and values [B,T,G,D] of all passes, the last included.

    In a round, the draft cache holds the first pass's keys at all positions but the last ones. Each later pass wrote
    one of those. So the entry at position t of pass `lag`, counted from 0, sees the first pass at positions up to
    t - lag, and each later pass i at position t - (lag - i) only.
    """
    b, t, _, d = query.shape
    key, value = seen[0]
    lag = len(seen) - 1
    query = query.reshape(b, t, key.shape[2], -1, d)
    place = jnp.arange(t)
    scores = jnp.einsum("btgnd,bsgd->bgnts", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(place[None, :] <= place[:, None] - lag, scaled(scores, config), -jnp.inf)
    later = []  # keys and values of each later pass, shifted to the entry that sees them, and the shift
    for i, (later_key, later_value) in enumerate(seen[1:], start=1):
        by = lag - i
        later.append((jnp.roll(later_key, by, axis=1), jnp.roll(later_value, by, axis=1), by))
    for own_key, _, by in later:
        score = jnp.einsum("btgnd,btgd->bgnt", query, own_key, preferred_element_type=jnp.float32)
        score = jnp.where(place >= by, scaled(score, config), -jnp.inf)  # the first `by` entries got wrapped keys
        scores = jnp.concatenate([scores, score[..., None]], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    mixed = jnp.einsum("bgnts,bsgd->btgnd", weights[..., :t], value)
    for i, (_, own_value, _) in enumerate(later):
        mixed += jnp.einsum("bgnt,btgd->btgnd", weights[..., t + i], own_value)
    return mixed.reshape(b, t, -1)


def scaled(scores, config):
    """Return query-key products as the softmax takes them: scaled, and soft-capped if the model does so."""
    scores = scores * config.query_scale
    return config.soft_cap * jnp.tanh(scores / config.soft_cap) if config.soft_cap else scores
