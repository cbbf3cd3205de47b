"""Growth of draft trees: several candidate tokens at each depth, of which the target accepts a path in one pass.

A drafter that reads its own drafts runs once for each level of the tree. The best candidates of a level are expanded:
the drafter reads them and ranks their children. The best candidates of all levels form the tree (EAGLE-2, Li et al.,
https://arxiv.org/abs/2406.16858). A drafter that drafts all levels at once (Medusa, DFlash) runs once. The tree's
topology is chosen in each round, or is fixed (Medusa's choices, https://arxiv.org/abs/2401.10774).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.layer import LayerCache
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters.base import Choose, Drafter, History, ModelParams, Proposal, Rank
from jaxspec.drafters.chain import Step
from jaxspec.drafters.trees.topology import Topology, take, topology
from jaxspec.drafters.wrapper import Wrapper
from jaxspec.models.paged import Branches


@dataclasses.dataclass(frozen=True)
class Shape:
    """The size of a draft tree.

    width: w, the number of candidate children of a node. Also the number of nodes of each level that get children.
    depth: D, the number of levels below the root.
    count: K, the number of drafts in the tree.
    choices: for a fixed tree, the path to each draft, as the rank of the candidate at each level, sorted by level;
      empty for a tree of the most probable drafts.
    """

    width: int
    depth: int
    count: int
    choices: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Tree(Wrapper):
    """A drafter that builds a draft tree from another drafter's candidate tokens.

    draft: the other drafter, whose number of drafts a round is the tree's depth.
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

    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Any
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        rank: Rank = choose
        deep = dataclasses.replace(history, num_wanted=jnp.minimum(history.num_wanted, self.shape.depth))
        if self.draft.independent:
            proposal, pages = self.draft.propose(params, cache, deep, ranked(rank, self.shape.depth))
            levels: Any = proposal.probs  # candidates' ids and scores, returned by `ranked` as the distribution
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
    """A finished draft tree of each row.

    tokens i32[B,K]: token ids of the drafts.
    topology: parents, ancestors and depths of the drafts.
    num_possible i32[B]: number of drafts before the first draft of probability 0.
    """

    tokens: jax.Array
    topology: Topology
    num_possible: jax.Array


def ranked(rank: Rank, depth: int) -> Choose:
    """Return a `Choose` function that takes the most probable token according to the function `rank`.

    In place of a distribution it returns the w most probable tokens as (ids, log-probabilities), each [B,w].

    depth: number of levels of the tree, which is the length of the paths that `rank` takes.
    """

    def choose(
        head: Any, hidden: Float[Array, "B _"], drafts: Int[Array, "B K"], i: Any
    ) -> tuple[Int[Array, " B"], Any]:
        ids, scores = rank(head, hidden[:, None], drafts[:, None, :depth], i)
        return ids[:, 0, 0], (ids[:, 0], scores[:, 0])

    return choose


def of_levels(
    shape: Shape, ids: Int[Array, "B D w"], scores: Float[Array, "B D w"], num_levels: Int[Array, " B"]
) -> Grown:
    """Return the draft tree of a drafter whose candidates at a level do not depend on the levels above.

    ids, scores: token ids of the w best candidates of each level, and their log-probabilities.
    num_levels: number of levels that the drafter has proposed for each row.
    """
    rows, depth = ids.shape[:2]
    scores = jnp.where(jnp.arange(depth)[:, None] < num_levels[:, None, None], scores, -jnp.inf)
    if shape.choices:
        level = jnp.array([len(path) - 1 for path in shape.choices])
        rank = jnp.array([path[-1] for path in shape.choices])
        places = {path: i + 1 for i, path in enumerate(shape.choices)}
        parents = jnp.array([0, *(places.get(path[:-1], 0) for path in shape.choices)], jnp.int32)
        tree = topology(jnp.broadcast_to(parents, (rows, len(parents))), shape.depth)
        # The proposal is a prefix of the drafts, which ends before the first draft of probability 0.
        possible = jnp.cumprod((scores[:, level, rank] > -jnp.inf).astype(jnp.int32), axis=1)
        return Grown(ids[:, level, rank], tree, jnp.sum(possible, axis=1, dtype=jnp.int32))

    def at_level(x: Array, i: Any) -> Array:
        return jnp.repeat(lax.dynamic_index_in_dim(x, i, axis=1), shape.width, axis=1)

    def expand(state: Any, nodes: Nodes, level: Any) -> tuple[Array, Array, Any]:
        return at_level(ids, level), at_level(scores, level), state

    return best_tree(shape, (ids[:, :1], scores[:, :1], ()), expand, alike=True)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Nodes:
    """The w nodes of one level of a draft tree that are expanded, which means that they get children.

    tokens i32[B,w]: token ids of the nodes.
    paths i32[B,w,D]: token ids on the path to each node, the node's own included.
    after i32[B,w]: index of each node's parent among the w expanded nodes of the level above.
    seen bool[B,w,_]: whether each of the w nodes attends to each expanded node of all levels, w nodes a level.
    """

    tokens: jax.Array
    paths: jax.Array
    after: jax.Array
    seen: jax.Array


def grow_tree(
    shape: Shape, first: Step, step: Callable[[Any, Nodes, Any], Step], rank: Rank, *, alike: bool = True
) -> tuple[Grown, Any]:
    """Grow a draft tree level by level. Return the tree and the last step's state.

    Args:
      shape: size of the tree.
      first: output of the draft's pass that reads the pending token, the tree's root.
      step: function step(state, nodes, level) that runs the draft's pass over the nodes of a level, counted from 1.
      rank: the round's `Rank`, which ranks the children of nodes.
      alike: whether all levels run the same program, so that a loop can compile it once.
    """

    def expand(state: Any, nodes: Nodes, level: Any) -> tuple[Array, Array, Any]:
        done = step(state, nodes, level)
        ids, scores = rank(done.head, done.hidden, nodes.paths, level)
        return ids, scores, done.state

    paths = jnp.zeros((first.hidden.shape[0], 1, shape.depth), jnp.int32)
    ids, scores = rank(first.head, first.hidden[:, None], paths, 0)
    return best_tree(shape, (ids, scores, first.state), expand, alike=alike)


def nodes_at(first: Int[Array, " B"], level: Any, nodes: Nodes, position: Int[Array, " B"], history: History) -> Any:
    """Return (positions of the cache slots, masked, block table, branches) for a draft's pass over a level's nodes.

    first: cache position of the first node of the first level; the nodes of all levels take consecutive positions.
    level: the level, counted from 1.
    position: position of the nodes in the text, which is the same for all nodes of a level.
    """
    width = nodes.tokens.shape[1]
    slots = first[:, None] + (level - 1) * width + jnp.arange(width, dtype=jnp.int32)
    masked = jnp.broadcast_to((~history.live | (history.num_wanted <= level))[:, None], slots.shape)
    branches = Branches(jnp.broadcast_to(position[:, None], slots.shape), first, nodes.seen)
    return slots, masked, history.block_table, branches


def best_of(scores: Float[Array, "B N"], count: int) -> tuple[Float[Array, "B w"], Int[Array, "B w"]]:
    """Return the `count` best scores of each row and their indices, best first. Ties go to the lower index.

    Nothing is sorted: the rank of a score is the number of better scores.
    """
    place = jnp.arange(scores.shape[1], dtype=jnp.int32)
    mine, other = scores[:, :, None], scores[:, None]
    before = (other > mine) | ((other == mine) & (place < place[:, None]))
    rank = jnp.sum(before, axis=2, dtype=jnp.int32)
    here = rank[:, None] == jnp.arange(count)[:, None]  # [B, count, N]
    chosen = jnp.sum(jnp.where(here, place, 0), axis=2, dtype=jnp.int32)
    return take(scores, chosen), chosen


def best_tree(shape: Shape, first: Any, expand: Callable[[Any, Nodes, Any], Any], *, alike: bool) -> tuple[Grown, Any]:
    """Build the draft tree of the best candidates of all levels. Return the tree and the last level's state.

    Args:
      shape: size of the tree.
      first: (ids [B,1,w], scores [B,1,w], state) of the root's candidate children; scores are log-probabilities.
      expand: function expand(state, nodes, level) that returns (ids [B,w,w], scores [B,w,w], state) of the candidate
        children of a level's nodes.
      alike: whether all levels run the same program, so that a loop can compile it once.
    """
    ids, scores, state = first
    width, depth = shape.width, shape.depth
    rows, each = ids.shape[0], width * width

    def padded(x: Array, fill: int | float) -> Array:
        return jnp.pad(x, ((0, 0), (0, (depth - 1) * each)), constant_values=fill)

    # `found` holds ids, scores and parents of all candidates: w children of the root (the pending token), then w * w of
    # each level. A parent is the index of another candidate, or -1 for the root.
    found = padded(ids[:, 0], 0), padded(scores[:, 0], -jnp.inf), jnp.full((rows, width + (depth - 1) * each), -1)
    own = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    paths = jnp.zeros((rows, width, depth), jnp.int32).at[:, :, 0].set(ids[:, 0])
    seen = own[:, :, None] == jnp.arange(max(depth - 1, 1) * width)
    nodes = Nodes(ids[:, 0], paths, jnp.zeros_like(own), seen)

    def one_more(level: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
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

    carry = state, found, nodes, (own, scores[:, 0])  # the last entry holds the nodes' indices in `found` and scores
    if alike and depth > 1:  # a loop compiles the levels once; without iterations its body would still be traced
        carry = lax.fori_loop(1, depth, one_more, carry)
    else:
        for level in range(1, depth):
            carry = one_more(level, carry)
    state, (ids, scores, parents), *_ = carry
    # A node's score is at most its parent's, and ties go to the lower index. So each chosen node comes after its
    # parent, and every prefix of the chosen nodes is the best tree of that size.
    best, chosen = best_of(scores, shape.count)
    wanted = take(parents, chosen)
    before = jnp.argmax(wanted[:, :, None] == chosen[:, None], axis=2).astype(jnp.int32) + 1
    tree = topology(jnp.pad(jnp.where(wanted < 0, 0, before), ((0, 0), (1, 0))), depth)
    num_possible = jnp.sum(best > -jnp.inf, axis=1, dtype=jnp.int32)
    return Grown(take(ids, chosen), tree, num_possible), state
