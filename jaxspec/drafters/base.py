"""The interface of drafters: methods that propose draft tokens.

A drafter object is static (frozen and hashable). It holds no arrays; its methods take and return them.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.layer import Kept, LayerCache, Moves
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.errors import UnsupportedError
from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters.trees.topology import Topology


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Proposal:
    """The K draft tokens of each row (sequence of the batch) in a round: a chain or a tree.

    tokens i32[B,K]: ids of the draft tokens.
    probs f32[B,K,V]: distribution q that each draft was drawn from; None for a deterministic proposal (one-hot q), or
      if no row's acceptance rule reads q.
    num_proposed i32[B]: number of real drafts in this round; the rest of the K are padding.
    draft_len i32[B]: number of valid positions of the draft's KV cache, if all drafts are accepted; None for a drafter
      without a cache.
    tree: topology of the drafts, in which likelier drafts come first; None for a chain.
    looked_up i32[B]: number of first drafts that prompt lookup found before another method's; None for a drafter that
      does not combine the two.
    """

    tokens: jax.Array
    probs: jax.Array | None
    num_proposed: jax.Array
    draft_len: jax.Array | None = None
    tree: Topology | None = None
    looked_up: jax.Array | None = None

    @property
    def num_looked_up(self) -> jax.Array:
        """The number i32[B] of first drafts that prompt lookup found: `looked_up`, or zeros if that is None."""
        return jnp.zeros_like(self.num_proposed) if self.looked_up is None else self.looked_up


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class History:
    """The committed tokens of all rows (sequences of the batch) at the start of a round.

    tokens i32[B,_]: tokens of prompt and output.
    num_tokens i32[B]: number of committed tokens.
    draft_len i32[B]: number of valid positions of the draft's KV cache.
    block_table i32[B,N]: ids of the row's cache pages.
    num_wanted i32[B]: maximum number of drafts in this round.
    live bool[B]: whether the row takes part in this round.
    window_table i32[B,N]: page ids of the target's layers with a window, if these have a pool of their own; else None.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    draft_len: jax.Array
    block_table: jax.Array
    num_wanted: jax.Array
    live: jax.Array
    window_table: jax.Array | None = None

    def kept(self, num_tokens: jax.Array, moves: Moves | None) -> Kept:
        """Return the tokens that stay of the round's target pass. num_tokens i32[B]: committed tokens after it."""
        return Kept(num_tokens - self.num_tokens, self.block_table, moves, self.window_table)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Chunk:
    """A part of each row's prompt, which one prefill pass reads.

    tokens i32[B,T]: tokens of the parts, padded to T.
    start i32[B]: position of the first token of the part.
    length i32[B]: number of real tokens; 0 if the row takes no part in the pass.
    block_table i32[B,N]: ids of the row's cache pages.
    next_tokens i32[B,T]: the token after each token, if log-probabilities of the prompt are requested; else None.
    window_table i32[B,N]: page ids of the target's layers with a window, if these have a pool of their own; else None.
    """

    tokens: jax.Array
    start: jax.Array
    length: jax.Array
    block_table: jax.Array
    next_tokens: jax.Array | None = None
    window_table: jax.Array | None = None

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The arrays that every model's pass reads, in the order of `PagedModel.prefill`'s arguments."""
        return self.tokens, self.start, self.length, self.block_table


# Type of a function choose(head, hidden, drafts, i) that samples the draft after the first i drafts of the round, with
# each row's request parameters. The function returns the token, and the token's distribution or None. head: a `Head`
# (which computes logits), or an object with the same methods. hidden: the head's input. The draft's vocabulary may be
# reduced, or padded differently from the target's V. The returned token and distribution are over the target's ids.
Choose = Callable[[Any, Float[Array, "B _"], Int[Array, "B K"], Any], tuple[Int[Array, " B"], Any]]

# Type of a function rank(head, hidden, paths, i) that returns the w most probable children of each of k nodes of a
# draft tree, best first, and their log-probabilities. paths: the i drafts that lead to each node, padded to depth D.
Rank = Callable[
    [Any, Float[Array, "B k _"], Int[Array, "B k D"], Any], tuple[Int[Array, "B k w"], Float[Array, "B k w"]]
]

# Type of all parameters: {"target": ..., "draft": ..., "shared": ...}. "shared" holds copies of those target parameters
# that the draft uses too, with the draft's placement on devices. It is left out if no copies are needed.
ModelParams = Mapping[str, Any]


def target_parameters(params: ModelParams) -> Mapping[str, Any]:
    """Return the target's parameters for a draft that shares some of them.

    A copy with the draft's placement on devices, where there is one, replaces the target's own.
    """
    return {**params["target"], **params["shared"]} if "shared" in params else params["target"]


@dataclasses.dataclass(frozen=True)
class Drafter(abc.ABC):
    """A method that proposes up to num_speculative_tokens = K draft tokens a round.

    A subclass overrides the methods that it needs.
    """

    num_speculative_tokens: int

    @property
    def backend(self) -> Any:
        """The backend (choice of kernels and devices) of the draft model's passes; None to use the target's."""
        return self.model.backend if hasattr(self, "model") else None

    def parameters(self) -> Any:
        """Return a pytree of the drafter's own arrays, or None. The drafter's methods get them as params["draft"].

        A drafter with a model gets the model's parameters in params["draft"] instead.
        """
        return None

    @property
    def max_model_len(self) -> int | None:
        """Longest context that the draft can read, in tokens; None if the draft has no limit of its own."""
        return None

    @property
    def max_lag(self) -> int | None:
        """Maximum number of positions by which the draft's KV cache may trail the committed prefix before a proposal.

        The prefix ends before the pending token, which is accepted but not yet in the target's cache. The value is None
        for a drafter without a cache.
        """
        return None

    @property
    def lookahead(self) -> int:
        """Number of tokens after its own position on which an entry of the draft's KV cache depends."""
        return 0

    @property
    def independent(self) -> bool:
        """Return whether the distribution of a draft does not depend on the drafts before it."""
        return False

    @property
    def tree_width(self) -> int | None:
        """Number of drafts that are ranked as children of each tree node; None for a drafter that proposes chains."""
        return None

    @property
    def reach(self) -> int:
        """Number of cache positions after the pending token (accepted, not yet in the cache) that a round may write."""
        return self.num_speculative_tokens

    @property
    def passes(self) -> float:
        """Number of times that a round reads the draft's weights, not counting weights that compute features."""
        return float(self.num_speculative_tokens)

    @property
    def taps(self) -> tuple[int, ...]:
        """Indices of the target's layers whose inputs the features are computed from. See `Decoder`."""
        return ()

    @property
    def features_width(self) -> int:
        """M, the size of the feature vector that is cached for each position; 0 for a drafter that reads no features.

        Features are computed from the target's hidden states.
        """
        return 0

    def features(
        self, params: ModelParams, hidden: Float[Array, "B T E"], tapped: Sequence[Float[Array, "B T E"]]
    ) -> Float[Array, "B T M"]:
        """Compute the features to cache from the target's hidden states.

        hidden: output of the target's last norm.
        tapped: inputs of the target's layers `taps`.
        """
        return hidden

    @abc.abstractmethod
    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        """Propose drafts. Return the proposal and the pages of the draft's KV cache after the draft's passes.

        A drafter that reads `cache.target` finds the pages of layers with a window by `history.window_table`, unless it
        is None.

        choose: function that chooses a draft: a `Choose`, or a `Rank` for a drafter that proposes trees.
        """

    def grow(
        self, params: ModelParams, cache: PagedKVCache, history: History, shape: Any, rank: Rank
    ) -> tuple[Proposal, Any, tuple[LayerCache, ...]]:
        """Propose a tree of `shape`. Return the proposal, the tree (`trees.growth.Grown`) and the draft's cache pages.

        rank: function that returns the children of nodes, see `Rank`.

        Only drafters that are not `independent` need this method.

        Raises:
          UnsupportedError: the drafter grows no trees.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot propose trees: leave the tree options out")

    def prefill(self, params: ModelParams, cache: PagedKVCache, chunk: Chunk) -> tuple[LayerCache, ...]:
        """Write a chunk of the prompts into the draft's cache pages and return the pages.

        The target's features of the chunk are already in `cache`.
        """
        return cache.draft
