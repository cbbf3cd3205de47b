"""Distance between the target's and the draft's distributions, a piece of the sequence at a time.

Under the standard rule a draft token is accepted with probability sum(min(p, q)) = 1 - TV(p, q): Leviathan et al.,
https://arxiv.org/abs/2211.17192. Distilling with it: Zhou et al., https://arxiv.org/abs/2310.08461.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

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

    configs: (target as `own_ids_first` made it, draft); counted: tokens that the draft shall predict from those before
    them. agree: both find the same id likeliest; lost: the target's probability of ids that the draft lacks.
    """
    models = [(config, params) for config, params in zip(configs, (target, draft), strict=True)]
    hidden = [whole(config, params, tokens, backend)[1] for config, params in models]
    num_own = configs[1].table_size - (configs[1].reduced_vocab_size is not None)

    @jax.checkpoint
    def piece(params, hidden, counted):
        logits = [bind(c, p).logits(h, backend) for c, p, h in zip(configs, params, hidden, strict=True)]
        log_p = lax.stop_gradient(jax.nn.log_softmax(logits[0]))
        log_q = jax.nn.log_softmax(logits[1][..., :num_own])
        own = log_p[..., :num_own]
        each = {name: LOSSES[name](own, log_q) for name in {*weights, "tv"}}
        same = jnp.argmax(log_p, axis=-1) == jnp.argmax(log_q, axis=-1)
        told = {"tv": each["tv"], "agree": same, "lost": 1.0 - jnp.sum(jnp.exp(own), axis=-1)}
        loss = sum(weight * each[name] for name, weight in weights.items())
        summed = lambda x: jnp.sum(jnp.where(counted, x, 0.0))
        return summed(loss), jax.tree.map(summed, told)

    def add(total, xs):
        return jax.tree.map(jnp.add, total, piece((target, draft), *xs)), None

    follows = jnp.pad(counted[:, 1:], ((0, 0), (0, 1)))  # the last token predicts nothing
    pieces = num_pieces(tokens.shape[0], tokens.shape[1], configs[0].vocab_size)
    cut = lambda x: x.reshape(x.shape[0], pieces, -1, *x.shape[2:]).swapaxes(0, 1)
    zero = (jnp.float32(0), dict.fromkeys(("tv", "agree", "lost"), jnp.float32(0)))
    return lax.scan(add, zero, (jax.tree.map(cut, hidden), cut(follows)))[0]


def num_pieces(rows: int, length: int, vocab_size: int) -> int:
    """The fewest pieces of the sequence, all of one length, with at most PIECE logits each."""
    fits = (n for n in range(1, length) if length % n == 0 and rows * (length // n) * vocab_size <= PIECE)
    return next(fits, length)
