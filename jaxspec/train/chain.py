"""Passes of a head that drafts one token after the other, each pass from what it made itself in the one before: in
training as in a round ("training-time test").

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
from jaxspec.train.passes import Said, of_tokens_after, projected, read
from pallas_kernels.plain import rms_norm

Seen = list[tuple[jax.Array, jax.Array]]  # keys and values of each pass, in one layer
# (the head, the next token and the feature of each entry [B,T,E], backend) -> (x, what its layer attends with, normed)
Enter = Callable[[Any, jax.Array, jax.Array, Any], tuple[jax.Array, jax.Array]]


def passes(enter: Enter, configs, draft, target, batch, backend, k: int, *, carries_normed: bool) -> Said:
    """The k passes that propose k drafts: the first over what the target has said; each one after it over what the one
    before made of the position before. carries_normed: whether that is read after the head's last norm."""
    config = configs[1]
    head: Any = bind(config, draft)
    decoder, hidden, tapped = read(configs[0], target, batch, backend, config.spec.taps)
    dtype = head.fc[...].dtype
    feature = head.features(hidden.astype(dtype), [x.astype(dtype) for x in tapped], backend)
    following = jnp.roll(batch["tokens"], -1, axis=1)
    token = lax.stop_gradient(decoder.embedded(following, backend)).astype(dtype)
    rows = whole_rows(*following.shape)
    seen: list[Seen] = [[] for _ in head.layers]
    said = []
    for _ in range(k):
        x, normed = one_pass(head, *enter(head, token, feature, backend), seen, rows, backend)
        said.append(normed)
        carried = normed if carries_normed else x
        feature = jnp.concatenate([feature[:, :1], carried[:, :-1]], axis=1)
    return of_tokens_after(2, jnp.stack(said, axis=2), hidden)


def one_pass(head, x, entry, seen: Sequence[Seen], rows: Rows, backend):
    """Through the head's layers, the first of which attends with `entry` [B,T,_]: (x [B,T,E], the same by the head's
    norm). Adds keys and values to what each has `seen`."""
    c, normed = head.config, entry
    norms = [*(layer.input_norm[...] for layer in head.layers[1:]), head.norm[...]]
    for layer, known, norm in zip(head.layers, seen, norms, strict=True):
        query, key, value = projected(layer, normed, rotary_tables(c.layers, rows, backend)[c.rope, c.head_dim])
        known.append((key, value))
        x, normed = layer.feed_forward(x, attend(query, known, c), backend, next_norm=norm)
        normed = rms_norm(norm, x, c.norm_eps) if normed is None else normed
    return x, normed


def attend(query, seen, config):
    """query [B,T,H,D] of the last pass; seen: keys and values [B,T,G,D] of all passes -> [B,T,H*D].

    A draft's cache holds what the first pass made of all positions but the last ones: before the entry at t stands, at
    t - i, that of the pass i before. So of the first pass it sees positions up to t - lag, and one of each other.
    """
    (b, t, _, d), (key, value), lag = query.shape, seen[0], len(seen) - 1
    query = query.reshape(b, t, key.shape[2], -1, d)
    place = jnp.arange(t)
    scores = jnp.einsum("btgnd,bsgd->bgnts", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(place[None, :] <= place[:, None] - lag, scaled(scores, config), -jnp.inf)
    back = lambda x, by: jnp.roll(x, by, axis=1)  # what stands `by` before; the first have none
    later = [(back(k, lag - i), back(v, lag - i), lag - i) for i, (k, v) in enumerate(seen) if i]
    for own_key, _, by in later:
        one = jnp.einsum("btgnd,btgd->bgnt", query, own_key, preferred_element_type=jnp.float32)
        scores = jnp.concatenate([scores, jnp.where(place >= by, scaled(one, config), -jnp.inf)[..., None]], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    mixed = jnp.einsum("bgnts,bsgd->btgnd", weights[..., :t], value)
    for i, (_, own_value, _) in enumerate(later):
        mixed += jnp.einsum("bgnt,btgd->btgnd", weights[..., t + i], own_value)
    return mixed.reshape(b, t, -1)


def scaled(scores, config):
    """Products of queries and keys, as they go into the softmax."""
    scores = scores * config.query_scale
    return config.soft_cap * jnp.tanh(scores / config.soft_cap) if config.soft_cap else scores
