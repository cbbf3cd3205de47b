"""What a round does otherwise where its drafts are a tree: each place has a past of its own, its ancestors."""

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
from jaxspec.sampling.processors import Adjust
from jaxspec.sampling.rng import take_row
from jaxspec.verify.base import Verdict
from jaxspec.verify.coupled import shared_noise
from pallas_kernels.plain import likeliest


def rank(
    context: Context,
    history: History,
    adjust: Adjust | None,
    head: Any,
    hidden: Float[Array, "B k _"],
    paths: Int[Array, "B k D"],
    i: jax.Array | int,
) -> tuple[Int[Array, "B k w"], Float[Array, "B k w"]]:
    """A tree drafter's `Rank`. The noise that the target's token will be drawn with is known: with it, the draft's
    candidates are those that the target is likely to draw, not only those that are likely."""
    config, rows = context.config, context.batch.sampling
    width = (config.drafter and config.drafter.tree_width) or 1
    variant, vocab_size, backend = config.variant, config.target.config.vocab_size, config.drafting
    logits = head.logits(hidden, backend)
    logits = fit_vocabulary(logits.reshape(*hidden.shape[:2], -1), vocab_size, head.vocabulary)
    if adjust is not None:
        logits = jax.vmap(lambda logits, path: adjust(logits, path, i), in_axes=1, out_axes=1)(logits, paths)
    if variant.noises:
        logits = process(logits, rows, filters=variant.filters, bits=DRAFT_BITS)
        if not config.greedy_draft:
            noise = shared_noise(rows.seed, history.num_tokens + i, vocab_size)
            logits += jnp.where(rows.greedy[:, None], 0.0, noise)[:, None]
    logs = jax.nn.log_softmax(logits, axis=-1)
    return largest(jnp.where(jnp.isnan(logs), -jnp.inf, logs), width)


def largest(logs: Float[Array, "B k V"], count: int) -> tuple[Int[Array, "B k w"], Float[Array, "B k w"]]:
    """(ids, values) of the largest, best first; ties go to the lowest id. They are few: nothing is sorted, which on TPU
    takes longer than all else, and on GPU breaks the program's graph."""
    ids, values = [], []
    for _ in range(count):
        found = likeliest(logs)
        values.append(jnp.max(logs, axis=-1))
        ids.append(found)
        logs = jnp.where(jnp.arange(logs.shape[-1]) == found[..., None], -jnp.inf, logs)
    return jnp.stack(ids, axis=-1), jnp.stack(values, axis=-1)


def of_tree(history: History, tree: Topology | None) -> Branches | None:
    """Where the places of the target's pass stand, and which of them each sees."""
    if tree is None:
        return None
    pending = history.num_tokens - 1
    return Branches(pending[:, None] + tree.depth, pending, tree.ancestors)


def adjusted(
    adjust: Adjust, logits: Float[Array, "B T V"], proposal: Proposal, tree: Topology
) -> Float[Array, "B T V"]:
    """Each place's logits after the drafts that lead to it."""
    places = jnp.pad(proposal.tokens, ((0, 0), (1, 0)))
    leading = jax.vmap(functools.partial(take, places), in_axes=1, out_axes=1)(tree.paths[:, :, 1:])
    return jax.vmap(adjust, in_axes=1, out_axes=1)(logits, leading, tree.depth)


def straightened(
    context: Context, history: History, proposal: Proposal, scores: Any, verdict: Verdict
) -> tuple[Proposal, Any, Moves]:
    """Return the accepted path as a chain: its drafts, the target's scores along it, and the moves that put what the
    caches hold of it where a chain's is. The draft's is not moved: its next pass computes it again."""
    tree, last = proposal.tree, verdict.last
    assert tree is not None
    assert last is not None
    path = take_row(tree.paths, last)  # [B, D + 1]
    step = jnp.arange(1, path.shape[1], dtype=jnp.int32)[None]
    stays = (step > verdict.num_accepted[:, None]) | (path[:, 1:] == step) | ~history.live[:, None]
    pending = history.num_tokens[:, None] - 1
    slots = context.config.target.slots(pending + step, stays, history.block_table)
    tokens = take(jnp.pad(proposal.tokens, ((0, 0), (1, 0))), path)[:, 1:]
    chain = dataclasses.replace(proposal, tokens=tokens, tree=None)
    return chain, type(scores)(*(take(x, path) for x in scores)), Moves(pending + path[:, 1:], slots)
