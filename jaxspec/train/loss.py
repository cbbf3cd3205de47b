"""Distance between the target's and the draft's distributions, a piece of the sequence at a time.

Under the standard rule a draft token is accepted with probability sum(min(p, q)) = 1 - TV(p, q): Leviathan et al.,
https://arxiv.org/abs/2211.17192. Distilling with it: Zhou et al., https://arxiv.org/abs/2310.08461.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.engine.setup import Model
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, bind, whole
from jaxspec.models.layers import Backend
from jaxspec.shapes import Array, Bool, Float, Int

PIECE = 1 << 28  # numbers of the target's logits that are held at a time

# Log-probabilities over the draft's ids, of the target (they may sum to less than 1) and of the draft -> [...].
LOSSES: dict[str, Callable[[Float[Array, "*n R"], Float[Array, "*n R"]], Float[Array, "*n"]]] = {
    "kl": lambda log_p, log_q: jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1),
    "rkl": lambda log_p, log_q: jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1),
    # What the draft lacks counts as lost.
    "tv": lambda log_p, log_q: 1.0 - jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1),
}


def own_ids_first(target: Model, d2t: np.ndarray | None) -> Model:
    """The target with a head whose first columns are those of the draft's ids, in the draft's order: its probabilities
    of these are then a slice."""
    head = target.params["embed"].T if target.config.tied else target.params["head"]
    if d2t is not None:
        own = d2t[:-1]
        head = head[:, np.concatenate([own, np.setdiff1d(np.arange(head.shape[1]), own)])]
    return Model(dataclasses.replace(target.config, tied=False), {**target.params, "head": head})


def computed(params: Params, dtype: Any) -> Params:
    """float32 parameters as the passes use them: products in dtype, norms and vocabularies as they are."""
    return {name: x.astype(dtype) if x.ndim > 1 else x for name, x in params.items()}


def loss_sums(
    configs: tuple[ModelConfig, ModelConfig],
    weights: Mapping[str, float],
    backend: Backend,
    draft: Params,
    target: Params,
    tokens: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """-> (weighted loss, {"tv", "agree", "lost"}), all summed over the positions that count.

    configs: (target as `own_ids_first` made it, draft); draft: float32, computed in the target's dtype; counted: tokens
    that the draft shall predict from those before them. agree: both find the same id likeliest; lost: the target's
    probability of ids that the draft lacks.
    """
    dtype = target["embed"].dtype
    theirs = whole(configs[0], target, tokens, backend)[1]
    mine = whole(configs[1], computed(draft, dtype), tokens, backend)[1]
    num_own = configs[1].table_size - (configs[1].reduced_vocab_size is not None)

    @jax.checkpoint
    def distances(draft, hidden, log_p, likeliest, counted):
        # Converted here, so that the pieces' gradients of the table are added up in float32.
        log_q = jax.nn.log_softmax(bind(configs[1], computed(draft, dtype)).logits(hidden, backend)[..., :num_own])
        each = {name: LOSSES[name](log_p, log_q) for name in {*weights, "tv"}}
        same = jnp.argmax(log_q, axis=-1) == likeliest
        told = {"tv": each["tv"], "agree": same, "lost": 1.0 - jnp.sum(jnp.exp(log_p), axis=-1)}
        loss = sum(weight * each[name] for name, weight in weights.items())
        summed = lambda x: jnp.sum(jnp.where(counted, x, 0.0))
        return summed(loss), jax.tree.map(summed, told)

    def add(total, piece):
        theirs, mine, counted = piece
        logits = bind(configs[0], target).logits(theirs, backend)
        log_p = logits[..., :num_own] - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        now = distances(draft, mine, log_p, jnp.argmax(logits, axis=-1), counted)
        return jax.tree.map(jnp.add, total, now), None

    follows = jnp.pad(counted[:, 1:], ((0, 0), (0, 1)))  # the last token predicts nothing
    pieces = num_pieces(tokens.shape[0], tokens.shape[1], configs[0].vocab_size)
    cut = lambda x: x.reshape(x.shape[0], pieces, -1, *x.shape[2:]).swapaxes(0, 1)
    zero = (jnp.float32(0), dict.fromkeys(("tv", "agree", "lost"), jnp.float32(0)))
    return lax.scan(add, zero, (cut(theirs), cut(mine), cut(follows)))[0]


def num_pieces(rows: int, length: int, vocab_size: int) -> int:
    """The fewest pieces of the sequence, all of one length, with at most PIECE logits each."""
    fits = (n for n in range(1, length) if length % n == 0 and rows * (length // n) * vocab_size <= PIECE)
    return next(fits, length)
