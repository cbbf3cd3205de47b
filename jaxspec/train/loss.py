"""Distance between the target's and the draft's distributions, a piece of the sequence at a time.

Under the standard rule a draft token is accepted with probability sum(min(p, q)) = 1 - TV(p, q): Leviathan et al.,
https://arxiv.org/abs/2211.17192. Distilling with it: Zhou et al., https://arxiv.org/abs/2310.08461.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, bind, whole
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.model import Model
from jaxspec.train import methods
from jaxspec.train.passes import Said

PIECE = 1 << 28  # logits that are held at a time
NEVER = -1e4  # log-probability of what cannot be; finite, because 0 x inf is no number
LEAST = 1e-6  # what is left beside other probabilities is not known better in float32

TOLD = ("tv", "agree", "lost")

# Log-probabilities of an outcome, of the target and of the draft -> its part of the divergence.
DIVERGENCES: dict[str, Callable[[Float[Array, "*n"], Float[Array, "*n"]], Float[Array, "*n"]]] = {
    "kl": lambda log_p, log_q: jnp.exp(log_p) * (log_p - log_q),
    "rkl": lambda log_p, log_q: jnp.exp(log_q) * (log_q - log_p),
}


class Teacher(NamedTuple):
    """What the target says of the tokens that come next, in the draft's ids.

    own: i32[..., n], or [n] where they are 0, 1, ...; what is not below the draft's number of ids it lacks.
    log_p f32[..., n]: their log-probabilities.
    rest f32[...]: that of all other ids together.
    likeliest i32[...]: one id.
    """

    own: jax.Array
    log_p: jax.Array
    rest: jax.Array
    likeliest: jax.Array


def own_ids_first(target: Model, d2t: np.ndarray | None) -> Model:
    """The target with a head whose first columns are those of the draft's ids, in the draft's order: its probabilities
    of these are then a slice."""
    head = target.params["embed"].T if target.config.tied else target.params["head"]
    if d2t is not None:
        head = head[:, np.concatenate([d2t, np.setdiff1d(np.arange(head.shape[1]), d2t)])]
    return Model(dataclasses.replace(target.config, tied=False), {**target.params, "head": head})


def computed(params: Params, dtype: Any) -> Params:
    """float32 parameters as the passes use them: products in dtype, norms and vocabularies as they are."""
    return {name: x.astype(dtype) if x.ndim > 1 else x for name, x in params.items()}


def stored(draft: Params, ids: Int[Array, "*rest n"], log_p: Float[Array, "*rest n"]) -> Teacher:
    """Of the target's n likeliest ids, likeliest first, as `likeliest.kept` has them."""
    own, log_p = ids.astype(jnp.int32), log_p.astype(jnp.float32)
    if "t2d" in draft:
        own = jnp.take(draft["t2d"], own, mode="clip")
    return Teacher(own, log_p, left(log_p), own[..., 0])


def computed_now(logits: Float[Array, "*rest V"], num_own: int) -> Teacher:
    """Of the logits of a target with the draft's `own_ids_first`."""
    log_p = logits[..., :num_own] - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    rest = jnp.full(logits.shape[:-1], jnp.log(LEAST))  # ids beyond these the draft lacks, or there are none
    return Teacher(jnp.arange(num_own), log_p, rest, jnp.argmax(logits, axis=-1))


def left(log_probs: Float[Array, "*rest n"]) -> Float[Array, "*rest"]:
    """The log-probability of all other outcomes."""
    return jnp.log(jnp.maximum(1.0 - jnp.sum(jnp.exp(log_probs), axis=-1), LEAST))


def distances(
    names: Iterable[str], teacher: Teacher, logits: Float[Array, "*rest _"]
) -> dict[str, Float[Array, "*rest"]]:
    """Each of the losses, and "tv", "agree" and "lost" (see `loss_sums`), between the target and the draft's logits.

    The outcomes are the listed ids that the draft has, and all ids that are not listed as one. Of these it is not known
    what the two have in common: total variation counts it as lost, as it does what the draft lacks.
    """
    log_q = logits if teacher.own.ndim == 1 else jnp.take_along_axis(logits, teacher.own, axis=-1, mode="clip")
    has = teacher.own < logits.shape[-1]
    log_q = jnp.where(has, log_q - jax.nn.logsumexp(logits, axis=-1, keepdims=True), NEVER)
    log_p = jnp.where(has, teacher.log_p, NEVER)
    outcomes, rest = (log_p, log_q), (teacher.rest, left(log_q))
    parts = ((name, DIVERGENCES[name]) for name in names if name in DIVERGENCES)
    return {
        **{name: jnp.sum(part(*outcomes), axis=-1) + part(*rest) for name, part in parts},
        "tv": 1.0 - jnp.sum(jnp.exp(jnp.minimum(*outcomes)), axis=-1),
        "agree": jnp.argmax(logits, axis=-1) == teacher.likeliest,
        "lost": 1.0 - jnp.sum(jnp.exp(log_p), axis=-1) - jnp.exp(teacher.rest),
    }


def loss_sums(
    configs: tuple[ModelConfig, ModelConfig],
    weights: Mapping[str, float],
    backend: Backend,
    dtype: Any,
    draft: Params,
    target: Params,
    batch: Mapping[str, jax.Array],
    k: int = 1,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """-> (weighted loss, {"tv", "agree", "lost", "count"}), all summed over the positions that count.

    configs: (target as `own_ids_first` made it, draft); draft: float32, computed in dtype; batch: tokens i32[B,T]; mask
    bool[B,T], of those that the draft shall predict from the tokens before them; and ids and log_p [B,T,n] of `stored`.
    Without these the target is computed here. k: drafts of a round, for a head that learns each. What is told is of the
    first: agree, that both find the same id likeliest; lost, the target's probability of ids that the draft lacks, as
    far as they are listed; count, how many they are.
    """
    draft_config, tokens, listed = configs[1], batch["tokens"], "ids" in batch
    method = methods.implementation(draft_spec(draft_config).method)
    says: Said = method.passes(configs, computed(draft, dtype), target, batch, backend, k)
    if listed:
        known = {name: batch[name] for name in ("ids", "log_p")}
    else:
        known = {"hidden": whole(configs[0], target, tokens, backend)[1] if says.seen is None else says.seen}
    # What the target says of a token stands beside the one before it.
    before, length = says.predicts - 1, tokens.shape[1]
    known = jax.tree.map(lambda x: jnp.take_along_axis(x, before[:, :, None], axis=1, mode="clip"), known)
    counts = jnp.take_along_axis(batch["mask"], says.predicts, axis=1, mode="clip") & (says.predicts < length)

    def teach(known: Mapping[str, jax.Array]) -> Teacher:
        if listed:
            return stored(draft, **known)
        return computed_now(bind(configs[0], target).logits(known["hidden"], backend), draft_config.head_size)

    @jax.checkpoint
    def sums(draft, teacher, piece):
        # Converted here, so that the pieces' gradients of the table are added up in float32.
        heads, loss, told = method.heads(configs, computed(draft, dtype), target, k), jnp.float32(0), dict(nothing)
        for i, head in enumerate(heads):
            each = distances(weights, teacher, head.logits(piece["hidden"][:, :, i], backend))
            share = jnp.where(piece["counts"], piece["shares"][..., i], 0.0)
            loss += sum(weight * jnp.sum(share * each[name]) for name, weight in weights.items())
            first = piece["counts"] & piece["first"][..., i]
            told = {name: x + jnp.sum(jnp.where(first, (each | {"count": 1.0})[name], 0.0)) for name, x in told.items()}
        return loss, told

    def add(total, piece):
        return jax.tree.map(jnp.add, total, sums(draft, teach(piece["known"]), piece)), None

    rows, entries = says.predicts.shape
    pieces = num_pieces(rows, entries, draft_config.head_size if listed else configs[0].vocab_size)
    of_rows = {"known": known, "hidden": says.hidden, "counts": counts}
    of_entries = {"shares": jnp.asarray(says.shares)[None], "first": jnp.asarray(says.first)[None]}
    nothing = dict.fromkeys((*TOLD, "count"), jnp.float32(0))
    return lax.scan(add, (jnp.float32(0), nothing), jax.tree.map(lambda x: cut(x, pieces), of_rows | of_entries))[0]


def cut(x: jax.Array, pieces: int) -> jax.Array:
    """[B, T, ...] -> [pieces, B, T / pieces, ...]"""
    return x.reshape(x.shape[0], pieces, -1, *x.shape[2:]).swapaxes(0, 1)


def num_pieces(rows: int, length: int, vocab_size: int) -> int:
    """The fewest pieces of the sequence, all of one length, with at most PIECE logits each."""
    fits = (n for n in range(1, length) if length % n == 0 and rows * (length // n) * vocab_size <= PIECE)
    return next(fits, length)
