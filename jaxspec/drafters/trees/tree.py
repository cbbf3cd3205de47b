"""Trees of drafts: several candidates after each other, of which the target's pass over all of them picks a path.

A drafter that sees what it has drafted is run level by level: of each level's candidates the best go on, and of all of
them the best make the tree (EAGLE-2, Li et al., https://arxiv.org/abs/2406.16858). One that says all places at once
(Medusa, DFlash) is run once. The shape is found anew each round, or is fixed (Medusa's choices,
https://arxiv.org/abs/2401.10774).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters.base import Choose, Chunk, Drafter, History, Rank
from jaxspec.drafters.chain import Step
from jaxspec.drafters.trees.topology import Topology, take, topology
from jaxspec.models.paged import Branches


@dataclasses.dataclass(frozen=True)
class Shape:
    """width: candidates after each node, and nodes of a level that go on; depth: levels; count: drafts that are kept.

    choices: of a fixed tree, the path to each draft, by rank at each level; those of a level after those of the one
    above it. Empty: the likeliest.
    """

    width: int
    depth: int
    count: int
    choices: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Tree(Drafter):
    """draft: the drafter, of as many tokens a round as the tree is deep."""

    draft: Drafter
    shape: Shape

    # What the drafter needs, this needs.
    max_model_len = property(lambda self: self.draft.max_model_len)
    max_lag = property(lambda self: self.draft.max_lag)
    reach = property(lambda self: max(self.num_speculative_tokens, self.draft.reach))
    lookahead = property(lambda self: self.draft.lookahead)
    passes = property(lambda self: self.draft.passes)
    taps = property(lambda self: self.draft.taps)
    features_width = property(lambda self: self.draft.features_width)
    tree_width = property(lambda self: self.shape.width)
    model = property(lambda self: getattr(self.draft, "model", None))
    target = property(lambda self: getattr(self.draft, "target", None))

    def features(self, params, hidden, tapped):
        return self.draft.features(params, hidden, tapped)

    def prefill(self, params, cache, chunk: Chunk):
        return self.draft.prefill(params, cache, chunk)

    def propose(self, params, cache, history: History, choose: Any):
        rank: Rank = choose
        deep = dataclasses.replace(history, num_wanted=jnp.minimum(history.num_wanted, self.shape.depth))
        if self.draft.independent:
            proposal, pages = self.draft.propose(params, cache, deep, ranked(rank, self.shape.depth))
            said: Any = proposal.probs
            ids, scores = said
            kept = of_levels(self.shape, ids, scores, proposal.num_proposed)
        else:
            proposal, kept, pages = self.draft.grow(params, cache, deep, self.shape, rank)
        tokens, tree, num_possible = kept
        wanted = jnp.where(proposal.num_proposed > 0, jnp.minimum(history.num_wanted, num_possible), 0)
        return dataclasses.replace(proposal, tokens=tokens, probs=None, num_proposed=wanted, tree=tree), pages


# Tokens i32[B,K], which comes after which, and how many of them are possible i32[B].
Kept = tuple[jax.Array, Topology, jax.Array]


def ranked(rank: Rank, depth: int) -> Choose:
    """A `Choose` that goes on with the likeliest, and gives (ids, scores) [B,w] where another gives a distribution."""

    def choose(head, hidden, drafts, i):
        ids, scores = rank(head, hidden[:, None], drafts[:, None, :depth], i)
        return ids[:, 0, 0], (ids[:, 0], scores[:, 0])

    return choose


def of_levels(
    shape: Shape, ids: Int[Array, "B D w"], scores: Float[Array, "B D w"], num_levels: Int[Array, " B"]
) -> Kept:
    """The tree of what is said of each level, whatever stands above."""
    rows, depth = ids.shape[:2]
    scores = jnp.where(jnp.arange(depth)[:, None] < num_levels[:, None, None], scores, -jnp.inf)
    if shape.choices:
        level = jnp.array([len(path) - 1 for path in shape.choices])
        rank = jnp.array([path[-1] for path in shape.choices])
        places = {path: i + 1 for i, path in enumerate(shape.choices)}
        parents = jnp.array([0, *(places.get(path[:-1], 0) for path in shape.choices)], jnp.int32)
        tree = topology(jnp.broadcast_to(parents, (rows, len(parents))), shape.depth)
        # A prefix is proposed: up to the first that is not possible.
        possible = jnp.cumprod((scores[:, level, rank] > -jnp.inf).astype(jnp.int32), axis=1)
        return ids[:, level, rank], tree, jnp.sum(possible, axis=1, dtype=jnp.int32)
    at = lambda x, i: jnp.repeat(lax.dynamic_index_in_dim(x, i, axis=1), shape.width, axis=1)
    weigh = lambda state, nodes, i: (at(ids, i), at(scores, i), state)
    return kept_of(shape, (ids[:, :1], scores[:, :1], ()), weigh, alike=True)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Nodes:
    """The w nodes of a level that go on.

    tokens i32[B,w]: their own; paths i32[B,w,D]: those that lead to them, these included.
    after i32[B,w]: which node of the level above each comes after.
    seen bool[B,w,_]: which nodes of all levels, w each, each of them sees.
    """

    tokens: jax.Array
    paths: jax.Array
    after: jax.Array
    seen: jax.Array


def grown(
    shape: Shape, first: Step, step: Callable[[Any, Nodes, Any], Step], rank: Rank, *, alike: bool = True
) -> tuple[Kept, Any]:
    """The tree, and the last state. first, and step(state, nodes, level): the passes that read the pending token, and
    the nodes of a level from 1 on. alike: the levels differ in nothing but their number."""

    def weigh(state, nodes: Nodes, level):
        done = step(state, nodes, level)
        return *rank(done.head, done.hidden, nodes.paths, level), done.state

    paths = jnp.zeros((first.hidden.shape[0], 1, shape.depth), jnp.int32)
    return kept_of(shape, (*rank(first.head, first.hidden[:, None], paths, 0), first.state), weigh, alike=alike)


def nodes_at(first: Int[Array, " B"], level: Any, nodes: Nodes, position: Int[Array, " B"], history: History) -> Any:
    """Where a draft's own pass over a level's nodes stands: (positions of their slots, masked, block table, branches),
    the slots of all levels being in a row from `first` on, and the nodes standing at `position`."""
    width = nodes.tokens.shape[1]
    slots = first[:, None] + (level - 1) * width + jnp.arange(width, dtype=jnp.int32)
    masked = jnp.broadcast_to((~history.live | (history.num_wanted <= level))[:, None], slots.shape)
    branches = Branches(jnp.broadcast_to(position[:, None], slots.shape), first, nodes.seen)
    return slots, masked, history.block_table, branches


def best_of(scores: Float[Array, "B N"], count: int) -> tuple[Float[Array, "B w"], Int[Array, "B w"]]:
    """(scores, places) of the best, of equals the first: each counts those before it, so that nothing is sorted."""
    place = jnp.arange(scores.shape[1], dtype=jnp.int32)
    mine, other = scores[:, :, None], scores[:, None]
    before = (other > mine) | ((other == mine) & (place < place[:, None]))
    rank = jnp.sum(before, axis=2, dtype=jnp.int32)
    here = rank[:, None] == jnp.arange(count)[:, None]  # [B, count, N]
    chosen = jnp.sum(jnp.where(here, place, 0), axis=2, dtype=jnp.int32)
    return take(scores, chosen), chosen


def kept_of(shape: Shape, first: Any, weigh: Callable[[Any, Nodes, Any], Any], *, alike: bool) -> tuple[Kept, Any]:
    """first: (ids [B,1,w], scores [B,1,w], state) of the pending token's children; weigh(state, nodes, level): the same
    [B,w,w] of those of a level's nodes."""
    (ids, scores, state), width, depth = first, shape.width, shape.depth
    rows, each = ids.shape[0], width * width
    # Candidates: the w after the pending token, then w * w of each level. parents: another candidate, -1 is that token.
    room = lambda x, fill: jnp.pad(x, ((0, 0), (0, (depth - 1) * each)), constant_values=fill)
    found = room(ids[:, 0], 0), room(scores[:, 0], -jnp.inf), jnp.full((rows, width + (depth - 1) * each), -1)
    own = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    paths = jnp.zeros((rows, width, depth), jnp.int32).at[:, :, 0].set(ids[:, 0])
    seen = own[:, :, None] == jnp.arange(max(depth - 1, 1) * width)
    nodes = Nodes(ids[:, 0], paths, jnp.zeros_like(own), seen)

    def one_more(level, carry):
        state, found, nodes, (best, best_scores) = carry
        ids, scores, state = weigh(state, nodes, level)
        total = (best_scores[:, :, None] + scores).reshape(rows, each)
        begin = width + (level - 1) * each
        new = ids.reshape(rows, each), total, jnp.repeat(best, width, axis=1)
        found = tuple(lax.dynamic_update_slice_in_dim(x, y, begin, axis=1) for x, y in zip(found, new, strict=True))
        best_scores, chosen = best_of(total, width)
        after, tokens = chosen // width, take(new[0], chosen)
        last = jnp.minimum(level, depth - 1)
        paths = lax.dynamic_update_index_in_dim(take(nodes.paths, after), tokens, last, axis=2)
        itself = own[:, :, None] + level * width == jnp.arange(nodes.seen.shape[2])
        seen = take(nodes.seen, after) | itself
        nodes = Nodes(tokens, paths, after, seen)
        return state, found, nodes, (begin + chosen, best_scores)

    carry = state, found, nodes, (own, scores[:, 0])
    if alike and depth > 1:  # compiled once; a loop of no rounds would be traced all the same
        carry = lax.fori_loop(1, depth, one_more, carry)
    else:
        for level in range(1, depth):
            carry = one_more(level, carry)
    state, (ids, scores, parents), *_ = carry
    # A node is no likelier than the one before it, and of equals the first is taken: so no node comes without that, and
    # not before it, and the first of them are the best tree of fewer.
    best, chosen = best_of(scores, shape.count)
    wanted = take(parents, chosen)
    before = jnp.argmax(wanted[:, :, None] == chosen[:, None], axis=2).astype(jnp.int32) + 1
    tree = topology(jnp.pad(jnp.where(wanted < 0, 0, before), ((0, 0), (1, 0))), depth)
    num_possible = jnp.sum(best > -jnp.inf, axis=1, dtype=jnp.int32)
    return (take(ids, chosen), tree, num_possible), state
