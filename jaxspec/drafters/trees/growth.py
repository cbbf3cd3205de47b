"""Trees of drafts: several candidates at each place, of which one target pass over all accepts a path.

A drafter that reads its own drafts runs once for each level. The best candidates of a level are expanded, and the best
candidates of all levels form the tree (EAGLE-2, Li et al., https://arxiv.org/abs/2406.16858). A drafter that drafts all
places at once (Medusa, DFlash) runs once. The tree's topology is chosen in each round, or is fixed (Medusa's choices,
https://arxiv.org/abs/2401.10774).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters.base import Choose, Drafter, History, Rank
from jaxspec.drafters.chain import Step
from jaxspec.drafters.trees.topology import Topology, take, topology
from jaxspec.drafters.wrapper import Wrapper
from jaxspec.models.paged import Branches


@dataclasses.dataclass(frozen=True)
class Shape:
    """The size of a tree.

    width: number of candidates after each node, and of nodes of a level that are expanded.
    depth: number of levels.
    count: number of drafts in the tree.
    choices: the fixed tree's path to each draft, as the rank at each level, sorted by level; empty for a tree of the
      most probable drafts.
    """

    width: int
    depth: int
    count: int
    choices: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Tree(Wrapper):
    """A drafter that makes a tree of another drafter's candidates.

    draft: the other drafter, for as many drafts a round as the tree is deep.
    shape: size of the tree.
    """

    draft: Drafter
    shape: Shape

    @property
    def reach(self) -> int:
        return max(self.num_speculative_tokens, self.draft.reach)

    @property
    def tree_width(self) -> int:
        return self.shape.width

    @property
    def model(self) -> Any:
        return getattr(self.draft, "model", None)

    @property
    def target(self) -> Any:
        return getattr(self.draft, "target", None)

    def propose(self, params, cache, history: History, choose: Any):
        rank: Rank = choose
        deep = dataclasses.replace(history, num_wanted=jnp.minimum(history.num_wanted, self.shape.depth))
        if self.draft.independent:
            proposal, pages = self.draft.propose(params, cache, deep, ranked(rank, self.shape.depth))
            levels: Any = proposal.probs  # `ranked` returns these in a distribution's place
            ids, scores = levels
            grown = of_levels(self.shape, ids, scores, proposal.num_proposed)
        else:
            proposal, grown, pages = self.draft.grow(params, cache, deep, self.shape, rank)
        wanted = jnp.where(proposal.num_proposed > 0, jnp.minimum(history.num_wanted, grown.num_possible), 0)
        proposal = dataclasses.replace(
            proposal, tokens=grown.tokens, probs=None, num_proposed=wanted, tree=grown.topology
        )
        return proposal, pages


class Grown(NamedTuple):
    """A tree of drafts.

    tokens i32[B,K]: ids of the drafts.
    topology: topology of the drafts.
    num_possible i32[B]: number of drafts that have probability above 0; they come first.
    """

    tokens: jax.Array
    topology: Topology
    num_possible: jax.Array


def ranked(rank: Rank, depth: int) -> Choose:
    """Return a `Choose` that takes the best candidate, and returns (ids, scores) [B,w] in a distribution's place."""

    def choose(head, hidden, drafts, i):
        ids, scores = rank(head, hidden[:, None], drafts[:, None, :depth], i)
        return ids[:, 0, 0], (ids[:, 0], scores[:, 0])

    return choose


def of_levels(
    shape: Shape, ids: Int[Array, "B D w"], scores: Float[Array, "B D w"], num_levels: Int[Array, " B"]
) -> Grown:
    """Return the tree of each level's candidates, which do not depend on the levels above.

    ids, scores: the w best candidates of each level, and their log-probabilities.
    num_levels: number of levels that the drafter has proposed.
    """
    rows, depth = ids.shape[:2]
    scores = jnp.where(jnp.arange(depth)[:, None] < num_levels[:, None, None], scores, -jnp.inf)
    if shape.choices:
        level = jnp.array([len(path) - 1 for path in shape.choices])
        rank = jnp.array([path[-1] for path in shape.choices])
        places = {path: i + 1 for i, path in enumerate(shape.choices)}
        parents = jnp.array([0, *(places.get(path[:-1], 0) for path in shape.choices)], jnp.int32)
        tree = topology(jnp.broadcast_to(parents, (rows, len(parents))), shape.depth)
        # The proposal is a prefix: it ends before the first draft of probability 0.
        possible = jnp.cumprod((scores[:, level, rank] > -jnp.inf).astype(jnp.int32), axis=1)
        return Grown(ids[:, level, rank], tree, jnp.sum(possible, axis=1, dtype=jnp.int32))

    def at_level(x, i):
        return jnp.repeat(lax.dynamic_index_in_dim(x, i, axis=1), shape.width, axis=1)

    def expand(state, nodes, level):
        return at_level(ids, level), at_level(scores, level), state

    return best_tree(shape, (ids[:, :1], scores[:, :1], ()), expand, alike=True)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Nodes:
    """The w nodes of a level that are expanded.

    tokens i32[B,w]: tokens of the nodes.
    paths i32[B,w,D]: tokens of the path to each node, its own included.
    after i32[B,w]: index of each node's parent among the nodes of the level above.
    seen bool[B,w,_]: which nodes of all levels, w each, a node attends to.
    """

    tokens: jax.Array
    paths: jax.Array
    after: jax.Array
    seen: jax.Array


def grow_tree(
    shape: Shape, first: Step, step: Callable[[Any, Nodes, Any], Step], rank: Rank, *, alike: bool = True
) -> tuple[Grown, Any]:
    """Grow a tree level by level. Return the tree and the last state.

    Args:
      shape: size of the tree.
      first: the output of the pass that reads the pending token.
      step: step(state, nodes, level) runs the pass that reads the nodes of a level, counted from 1.
      rank: the round's `Rank`.
      alike: whether all levels run the same program.
    """

    def expand(state, nodes: Nodes, level):
        done = step(state, nodes, level)
        ids, scores = rank(done.head, done.hidden, nodes.paths, level)
        return ids, scores, done.state

    paths = jnp.zeros((first.hidden.shape[0], 1, shape.depth), jnp.int32)
    ids, scores = rank(first.head, first.hidden[:, None], paths, 0)
    return best_tree(shape, (ids, scores, first.state), expand, alike=alike)


def nodes_at(first: Int[Array, " B"], level: Any, nodes: Nodes, position: Int[Array, " B"], history: History) -> Any:
    """Return (positions of the slots, masked, block table, branches) of a draft's own pass over a level's nodes.

    first: position of the first level's first slot; the slots of all levels are consecutive.
    position: position of the nodes in the text.
    """
    width = nodes.tokens.shape[1]
    slots = first[:, None] + (level - 1) * width + jnp.arange(width, dtype=jnp.int32)
    masked = jnp.broadcast_to((~history.live | (history.num_wanted <= level))[:, None], slots.shape)
    branches = Branches(jnp.broadcast_to(position[:, None], slots.shape), first, nodes.seen)
    return slots, masked, history.block_table, branches


def best_of(scores: Float[Array, "B N"], count: int) -> tuple[Float[Array, "B w"], Int[Array, "B w"]]:
    """Return the scores and places of the `count` best, best first. Ties go to the first place.

    Each place counts the better ones, so nothing is sorted.
    """
    place = jnp.arange(scores.shape[1], dtype=jnp.int32)
    mine, other = scores[:, :, None], scores[:, None]
    before = (other > mine) | ((other == mine) & (place < place[:, None]))
    rank = jnp.sum(before, axis=2, dtype=jnp.int32)
    here = rank[:, None] == jnp.arange(count)[:, None]  # [B, count, N]
    chosen = jnp.sum(jnp.where(here, place, 0), axis=2, dtype=jnp.int32)
    return take(scores, chosen), chosen


def best_tree(shape: Shape, first: Any, expand: Callable[[Any, Nodes, Any], Any], *, alike: bool) -> tuple[Grown, Any]:
    """Find the tree of the best candidates of all levels. Return the tree and the last state.

    Args:
      shape: size of the tree.
      first: (ids [B,1,w], scores [B,1,w], state), the candidates after the pending token.
      expand: expand(state, nodes, level) returns the same for the candidates [B,w,w] after the nodes of a level.
      alike: whether all levels run the same program.
    """
    ids, scores, state = first
    width, depth = shape.width, shape.depth
    rows, each = ids.shape[0], width * width

    def padded(x, fill):
        return jnp.pad(x, ((0, 0), (0, (depth - 1) * each)), constant_values=fill)

    # found: ids, scores and parents of all candidates, w after the pending token and then w * w of each level. A parent
    # is the index of another candidate, or -1 for the pending token.
    found = padded(ids[:, 0], 0), padded(scores[:, 0], -jnp.inf), jnp.full((rows, width + (depth - 1) * each), -1)
    own = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    paths = jnp.zeros((rows, width, depth), jnp.int32).at[:, :, 0].set(ids[:, 0])
    seen = own[:, :, None] == jnp.arange(max(depth - 1, 1) * width)
    nodes = Nodes(ids[:, 0], paths, jnp.zeros_like(own), seen)

    def one_more(level, carry):
        state, found, nodes, (best, best_scores) = carry
        ids, scores, state = expand(state, nodes, level)
        total = (best_scores[:, :, None] + scores).reshape(rows, each)
        begin = width + (level - 1) * each
        new = ids.reshape(rows, each), total, jnp.repeat(best, width, axis=1)
        found = tuple(lax.dynamic_update_slice_in_dim(x, y, begin, axis=1) for x, y in zip(found, new, strict=True))
        best_scores, chosen = best_of(total, width)
        after = chosen // width
        tokens = take(new[0], chosen)
        last = jnp.minimum(level, depth - 1)
        paths = lax.dynamic_update_index_in_dim(take(nodes.paths, after), tokens, last, axis=2)
        itself = own[:, :, None] + level * width == jnp.arange(nodes.seen.shape[2])
        seen = take(nodes.seen, after) | itself
        nodes = Nodes(tokens, paths, after, seen)
        return state, found, nodes, (begin + chosen, best_scores)

    carry = state, found, nodes, (own, scores[:, 0])  # last: the nodes' indices in `found`, and their scores
    if alike and depth > 1:  # compile the levels once; a loop without iterations would still be traced
        carry = lax.fori_loop(1, depth, one_more, carry)
    else:
        for level in range(1, depth):
            carry = one_more(level, carry)
    state, (ids, scores, parents), *_ = carry
    # A node's score is at most its parent's, and ties go to the first. So each chosen node comes after its parent, and
    # every prefix of the chosen nodes is the best tree of that size.
    best, chosen = best_of(scores, shape.count)
    wanted = take(parents, chosen)
    before = jnp.argmax(wanted[:, :, None] == chosen[:, None], axis=2).astype(jnp.int32) + 1
    tree = topology(jnp.pad(jnp.where(wanted < 0, 0, before), ((0, 0), (1, 0))), depth)
    num_possible = jnp.sum(best > -jnp.inf, axis=1, dtype=jnp.int32)
    return Grown(take(ids, chosen), tree, num_possible), state
