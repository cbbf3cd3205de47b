"""Losses between the target's and the draft's distributions, computed in pieces along the sequence.

Under the standard rule a draft token is accepted with probability sum(min(p, q)) = 1 - TV(p, q). p is the target's
distribution, q the draft's, and TV the total variation: Leviathan et al., https://arxiv.org/abs/2211.17192.
Distillation with the loss TV: Zhou et al., https://arxiv.org/abs/2310.08461.
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
from jaxspec.train.passes import Batch, OutputHead, PassOutputs

PIECE = 1 << 28  # largest number of logits in memory at a time
LOG_ZERO = -1e4  # log-probability of an impossible outcome; finite, because 0 * inf is NaN
LEAST = 1e-6  # floor of 1 minus a sum of probabilities in float32, whose rounding error may be nearly this large

METRICS = ("tv", "agree", "lost")

# Divergences, each as a function from an outcome's log-probabilities under target (p) and draft (q) to a summand.
DIVERGENCES: dict[str, Callable[[Float[Array, "*n"], Float[Array, "*n"]], Float[Array, "*n"]]] = {
    "kl": lambda log_p, log_q: jnp.exp(log_p) * (log_p - log_q),
    "rkl": lambda log_p, log_q: jnp.exp(log_q) * (log_q - log_p),
}


Sums = tuple[Float[Array, ""], dict[str, Float[Array, ""]]]  # the loss and the metrics, both summed over predictions


class TargetProbs(NamedTuple):
    """The target's distributions over the next token: n listed ids, and all other ids together as one outcome.

    draft_ids: i32[..., n], the listed ids as the draft numbers them; or [n] if they are 0, 1, ... Values that are not
      below the draft's number of ids are ids that the draft lacks.
    log_p: f32[..., n], log-probabilities of the listed ids.
    rest: f32[...], the log-probability of all other ids together; log(LEAST) if the listed ids are all of the draft's.
    argmax: i32[...], the most probable id, as the draft numbers it.
    """

    draft_ids: jax.Array
    log_p: jax.Array
    rest: jax.Array
    argmax: jax.Array


def own_ids_first(target: Model, d2t: np.ndarray | None) -> Model:
    """Return the target with its output head's columns reordered: the draft's ids come first, in the draft's order.

    So the logits of the draft's ids are a slice of all logits. The returned head is never tied to the embedding table.

    d2t: i32[_], the target's id of each draft id; None if the draft has all ids.
    """
    head = target.params["embed"].T if target.config.tied else target.params["head"]
    if d2t is not None:
        head = head[:, np.concatenate([d2t, np.setdiff1d(np.arange(head.shape[1]), d2t)])]
    return Model(dataclasses.replace(target.config, tied=False), {**target.params, "head": head})


def computed(params: Params, dtype: Any) -> Params:
    """Return float32 parameters as the forward passes use them: matrices in dtype; norms, biases and ids unchanged."""
    return {name: x.astype(dtype) if x.ndim > 1 else x for name, x in params.items()}


def stored(draft: Params, ids: Int[Array, "*rest n"], log_p: Float[Array, "*rest n"]) -> TargetProbs:
    """Return the target's distributions from the records of `top_tokens.kept`.

    draft: the draft's parameters. ids: the target's n most probable ids, in falling order. log_p: their
      log-probabilities.
    """
    draft_ids = ids.astype(jnp.int32)
    log_p = log_p.astype(jnp.float32)
    if "t2d" in draft:
        draft_ids = jnp.take(draft["t2d"], draft_ids, mode="clip")
    return TargetProbs(draft_ids, log_p, log_rest(log_p), draft_ids[..., 0])


def computed_now(logits: Float[Array, "*rest V"], num_own: int) -> TargetProbs:
    """Return the target's distributions from its logits, if `own_ids_first` has put the draft's ids first.

    num_own: the draft's number of ids.
    """
    log_p = logits[..., :num_own] - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # Target ids beyond num_own, if any, are ids that the draft lacks. They are not a common outcome of both models.
    rest = jnp.full(logits.shape[:-1], jnp.log(LEAST))
    return TargetProbs(jnp.arange(num_own), log_p, rest, jnp.argmax(logits, axis=-1))


def log_rest(log_probs: Float[Array, "*rest n"]) -> Float[Array, "*rest"]:
    """Return the log-probability of all other outcomes together, from those of the listed outcomes."""
    return jnp.log(jnp.maximum(1.0 - jnp.sum(jnp.exp(log_probs), axis=-1), LEAST))


def distances(
    names: Iterable[str], target: TargetProbs, logits: Float[Array, "*rest _"]
) -> dict[str, Float[Array, "*rest"]]:
    """Return the named losses and the metrics "tv", "agree" and "lost" (see `loss_sums`) of the draft's logits.

    They compare two distributions over the listed ids that the draft has, and one joint outcome of all ids that are
    not listed. How far the two models agree within the joint outcome is unknown. So total variation counts it as
    rejected, like ids that the draft lacks.
    """
    if target.draft_ids.ndim == 1:
        log_q = logits
    else:
        log_q = jnp.take_along_axis(logits, target.draft_ids, axis=-1, mode="clip")
    has = target.draft_ids < logits.shape[-1]
    log_q = jnp.where(has, log_q - jax.nn.logsumexp(logits, axis=-1, keepdims=True), LOG_ZERO)
    log_p = jnp.where(has, target.log_p, LOG_ZERO)
    rest_q = log_rest(log_q)
    found = {}
    for name in names:
        if name in DIVERGENCES:
            term = DIVERGENCES[name]
            found[name] = jnp.sum(term(log_p, log_q), axis=-1) + term(target.rest, rest_q)
    return found | {
        "tv": 1.0 - jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1),
        "agree": jnp.argmax(logits, axis=-1) == target.argmax,
        "lost": 1.0 - jnp.sum(jnp.exp(log_p), axis=-1) - jnp.exp(target.rest),
    }


def loss_sums(
    configs: tuple[ModelConfig, ModelConfig],
    weights: Mapping[str, float],
    backend: Backend,
    dtype: Any,
    draft: Params,
    target: Params,
    batch: Batch,
    k: int = 1,
) -> Sums:
    """Return the weighted loss and the metrics "tv", "agree", "lost" and "count", summed over predictions.

    Args:
      configs: configurations of the target and of the draft.
      weights: weight of each loss, by name.
      backend: the device, and the implementation of each of the models' operations.
      dtype: dtype of the computation.
      draft: the draft's parameters, float32.
      target: the target's parameters, from `own_ids_first` if the batch has no ids. A draft model does not read them if
        the batch has ids.
      batch: tokens i32[B,T]; mask bool[B,T], True for tokens that the draft is to predict from those before; draw
        u32[B], a random number for each row; optionally the fields of `features.kept`, and the ids and log_p [B,T,n] of
        `stored`. Without ids, the target's distributions are computed here.
      k: number of drafts of a round. A head learns each of them.

    The metrics cover the first draft of a round only. tv: total variation. agree: 1 where both models have the same
    argmax token. lost: the target's probability of ids that the draft lacks (of the listed ids if the batch has ids).
    count: the number of predictions. A prediction counts if the mask is True for the predicted token.
    """
    draft_config, tokens = configs[1], batch["tokens"]
    listed = "ids" in batch  # whether the batch holds the target's distributions
    method = methods.implementation(draft_spec(draft_config).method)
    outputs: PassOutputs = method.passes(configs, computed(draft, dtype), target, batch, backend, k)
    if listed:
        known = {name: batch[name] for name in ("ids", "log_p")}
    elif outputs.seen is None:
        known = {"hidden": whole(configs[0], target, tokens, backend)[1]}
    else:
        known = {"hidden": outputs.seen}
    # The target's distribution of a token is computed at the position before that token.
    before, length = outputs.predicts - 1, tokens.shape[1]
    known = jax.tree.map(lambda x: jnp.take_along_axis(x, before[:, :, None], axis=1, mode="clip"), known)
    counts = jnp.take_along_axis(batch["mask"], outputs.predicts, axis=1, mode="clip") & (outputs.predicts < length)

    def target_probs(known: Mapping[str, jax.Array]) -> TargetProbs:
        if listed:
            return stored(draft, **known)
        return computed_now(bind(configs[0], target).logits(known["hidden"], backend), draft_config.head_size)

    @jax.checkpoint
    def sums(draft: Params, probs: TargetProbs, piece: Mapping[str, Any]) -> Sums:
        # The parameters are converted in every piece, so that the pieces' gradients of the heads add up in float32.
        heads: list[OutputHead] = method.heads(configs, computed(draft, dtype), target, k)
        loss, metrics = jnp.float32(0), dict(zeros)
        for i, head in enumerate(heads):
            each = distances(weights, probs, head.logits(piece["hidden"][:, :, i], backend))
            share = jnp.where(piece["counts"], piece["shares"][..., i], 0.0)
            loss += sum(weight * jnp.sum(share * each[name]) for name, weight in weights.items())
            first = piece["counts"] & piece["first"][..., i]
            values = each | {"count": 1.0}
            metrics = {name: x + jnp.sum(jnp.where(first, values[name], 0.0)) for name, x in metrics.items()}
        return loss, metrics

    def add(total: Sums, piece: Mapping[str, Any]) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, total, sums(draft, target_probs(piece["known"]), piece)), None

    rows, entries = outputs.predicts.shape
    pieces = num_pieces(rows, entries, draft_config.head_size if listed else configs[0].vocab_size)
    of_rows = {"known": known, "hidden": outputs.hidden, "counts": counts}
    of_entries = {"shares": jnp.asarray(outputs.shares)[None], "first": jnp.asarray(outputs.first)[None]}
    zeros = dict.fromkeys((*METRICS, "count"), jnp.float32(0))
    total, _ = lax.scan(add, (jnp.float32(0), zeros), jax.tree.map(lambda x: cut(x, pieces), of_rows | of_entries))
    return total


def cut(x: jax.Array, pieces: int) -> jax.Array:
    """Return x [B, T, ...] divided into pieces along the sequence, [pieces, B, T / pieces, ...]."""
    return x.reshape(x.shape[0], pieces, -1, *x.shape[2:]).swapaxes(0, 1)


def num_pieces(rows: int, length: int, vocab_size: int) -> int:
    """Return the smallest number of equal pieces of a sequence such that each piece has at most PIECE logits."""
    fits = (n for n in range(1, length) if length % n == 0 and rows * (length // n) * vocab_size <= PIECE)
    return next(fits, length)
