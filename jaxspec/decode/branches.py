"""The steps of a round that differ for a tree of draft tokens.

Of the tree's nodes, a node attends only to itself and its ancestors.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.layer import Moves
from jaxspec.common.shapes import Array, Float, Int
from jaxspec.decode.state import Context
from jaxspec.drafters.base import History, Proposal
from jaxspec.drafters.trees.topology import Topology, take
from jaxspec.models.head import fit_vocabulary
from jaxspec.models.paged import Branches
from jaxspec.sampling.distribution import DRAFT_BITS, process
from jaxspec.sampling.processors.base import Adjust
from jaxspec.sampling.rng import take_row
from jaxspec.verify.base import Verdict
from jaxspec.verify.coupled import shared_noise
from pallas_kernels.plain import argmax


def rank(
    context: Context,
    history: History,
    adjust: Adjust | None,
    head: Any,
    hidden: Float[Array, "B k _"],
    paths: Int[Array, "B k D"],
    i: jax.Array | int,
) -> tuple[Int[Array, "B k w"], Float[Array, "B k w"]]:
    """Return the w best tokens as children of each of k nodes, and their log-probabilities. Implements `Rank`.

    In rows that sample, the noise that the target's token will be drawn with is added to the draft's logits, unless the
    draft is greedy. The best tokens are then those that the target is likely to draw with this noise.

    adjust: function that applies penalties, bias and forbidden ids to logits; None if no row requests any.
    head: the draft's output head.
    hidden: the draft's hidden state of each node.
    paths: draft tokens on the path from the root to each node, padded to the tree's depth D.
    i: number of draft tokens on each path.
    """
    config, rows = context.config, context.batch.sampling
    width = (config.drafter.tree_width if config.drafter else None) or 1
    variant, vocab_size, backend = config.variant, config.target.config.vocab_size, config.drafting
    logits = head.logits(hidden, backend)
    logits = fit_vocabulary(logits.reshape(*hidden.shape[:2], -1), vocab_size, head.vocabulary)
    if adjust is not None:

        def adjust_node(logits: jax.Array, path: jax.Array) -> jax.Array:
            return adjust(logits, path, i)

        logits = jax.vmap(adjust_node, in_axes=1, out_axes=1)(logits, paths)
    if variant.noises:
        logits = process(logits, rows, filters=variant.filters, bits=DRAFT_BITS)
        if not config.greedy_draft:
            noise = shared_noise(rows.seed, history.num_tokens + i, vocab_size)
            logits += jnp.where(rows.greedy[:, None], 0.0, noise)[:, None]
    logs = jax.nn.log_softmax(logits, axis=-1)
    return largest(jnp.where(jnp.isnan(logs), -jnp.inf, logs), width)


def largest(logs: Float[Array, "B k V"], count: int) -> tuple[Int[Array, "B k w"], Float[Array, "B k w"]]:
    """Return the ids and values of the `count` largest log-probabilities of each node. Ties go to the lowest id.

    `count` is small, so an argmax finds each of them in turn. A sort would be the slowest part of the program on TPU,
    and on GPU would prevent running the program as one CUDA graph.
    """
    ids, values = [], []
    for _ in range(count):
        best = argmax(logs)
        values.append(jnp.max(logs, axis=-1))
        ids.append(best)
        logs = jnp.where(jnp.arange(logs.shape[-1]) == best[..., None], -jnp.inf, logs)
    return jnp.stack(ids, axis=-1), jnp.stack(values, axis=-1)


def target_branches(history: History, tree: Topology | None) -> Branches | None:
    """Return the text positions of a tree's nodes, and the nodes that each one attends to in the target's pass.

    tree: the tree of draft tokens; None for a chain, for which the result is None too.
    """
    if tree is None:
        return None
    pending = history.num_tokens - 1
    return Branches(pending[:, None] + tree.depth, pending, tree.ancestors)


def adjust_tree(
    adjust: Adjust, logits: Float[Array, "B T V"], proposal: Proposal, tree: Topology
) -> Float[Array, "B T V"]:
    """Return the logits of each node, adjusted by penalties and the like for the tokens on the path to the node.

    adjust: function that applies these changes to the logits of one node.
    """
    places = jnp.pad(proposal.tokens, ((0, 0), (1, 0)))
    leading = jax.vmap(functools.partial(take, places), in_axes=1, out_axes=1)(tree.paths[:, :, 1:])
    return jax.vmap(adjust, in_axes=1, out_axes=1)(logits, leading, tree.depth)


def path_as_chain(
    context: Context, history: History, proposal: Proposal, scores: Any, verdict: Verdict
) -> tuple[Proposal, Any, Moves]:
    """Return the accepted path of a tree as a chain: its draft tokens, the target's scores of them, and cache moves.

    The moves bring the target's cache entries from the slots of the tree's nodes to the slots of a chain. Entries in
    the draft's cache are not moved, because the draft's next pass recomputes them.
    """
    tree, last = proposal.tree, verdict.last
    assert tree is not None
    assert last is not None
    path = take_row(tree.paths, last)  # nodes on the accepted path, root first, [B, D + 1]
    step = jnp.arange(1, path.shape[1], dtype=jnp.int32)[None]
    stays = (step > verdict.num_accepted[:, None]) | (path[:, 1:] == step) | ~history.live[:, None]
    pending = history.num_tokens[:, None] - 1
    target, to = context.config.target, (pending + step, stays)
    slots = target.slots(*to, history.block_table), target.window_slots(*to, history.window_table)
    tokens = take(jnp.pad(proposal.tokens, ((0, 0), (1, 0))), path)[:, 1:]
    chain = dataclasses.replace(proposal, tokens=tokens, tree=None)
    return chain, type(scores)(*(take(x, path) for x in scores)), Moves(pending + path[:, 1:], *slots)
