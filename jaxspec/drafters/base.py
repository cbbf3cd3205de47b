"""The interface of drafters. A drafter is static (frozen and hashable); all arrays pass through its methods."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxspec.cache.layer import LayerCache
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.errors import UnsupportedError
from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters.trees.topology import Topology


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Proposal:
    """The K drafts of each row in a round: a chain or a tree.

    tokens i32[B,K]: ids of the drafts.
    probs f32[B,K,V]: distribution q that each draft was drawn from; None for a deterministic proposal (one-hot q).
    num_proposed i32[B]: number of real drafts in this round.
    draft_len i32[B]: number of valid positions of the draft cache, if all drafts are accepted; None without a cache.
    tree: topology of the drafts, the likelier ones first; None for a chain.
    """

    tokens: jax.Array
    probs: jax.Array | None
    num_proposed: jax.Array
    draft_len: jax.Array | None = None
    tree: Topology | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class History:
    """The committed text of all rows at the start of a round.

    tokens i32[B,_]: prompt and output.
    num_tokens i32[B]: number of committed tokens.
    draft_len i32[B]: number of valid positions of the draft cache.
    block_table i32[B,N]: page ids.
    num_wanted i32[B]: maximum number of drafts in this round.
    live bool[B]: whether the row takes part in this round.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    draft_len: jax.Array
    block_table: jax.Array
    num_wanted: jax.Array
    live: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Chunk:
    """A part of each row's prompt.

    tokens i32[B,T]: tokens of the prompts.
    start i32[B]: position of the first of them.
    length i32[B]: number of real tokens; 0 if the row takes no part.
    block_table i32[B,N]: page ids.
    next_tokens i32[B,T]: the token after each, if its log-probability is requested; else None.
    """

    tokens: jax.Array
    start: jax.Array
    length: jax.Array
    block_table: jax.Array
    next_tokens: jax.Array | None = None

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The arrays in the order of `PagedModel.prefill`'s arguments."""
        return self.tokens, self.start, self.length, self.block_table


# A function choose(head, hidden, drafts, i) that samples the draft after the first i drafts of the round, with each
# row's request parameters. It returns the token, and its distribution or None. head: a `Head`, or an object with its
# methods. The draft's vocabulary may be reduced, or padded differently from the target's V. The returned token and
# distribution are over the target's ids.
Choose = Callable[[Any, Float[Array, "B _"], Int[Array, "B K"], Any], tuple[Int[Array, " B"], Any]]

# A function rank(head, hidden, paths, i) that returns the w best drafts after each of k nodes, best first, and their
# log-probabilities. paths: the i drafts that lead to each node, padded to D.
Rank = Callable[
    [Any, Float[Array, "B k _"], Int[Array, "B k D"], Any], tuple[Int[Array, "B k w"], Float[Array, "B k w"]]
]

# {"target": ..., "draft": ..., "shared": ...}; "shared": copies of shared target parameters with the draft's placement.
ModelParams = Mapping[str, Any]


def target_parameters(params: ModelParams) -> Mapping[str, Any]:
    """Return the target's parameters for a draft that shares them. Copies with the draft's placement come first."""
    return {**params["target"], **params["shared"]} if "shared" in params else params["target"]


@dataclasses.dataclass(frozen=True)
class Drafter(abc.ABC):
    """A method that proposes up to num_speculative_tokens = K drafts a round. A subclass overrides what it needs."""

    num_speculative_tokens: int

    @property
    def backend(self) -> Any:
        """The backend of the draft's passes: its model's, or None for the target's."""
        return self.model.backend if hasattr(self, "model") else None

    def parameters(self) -> Any:
        """Return a pytree of the drafter's own arrays, or None. Its methods get them as params["draft"].

        A drafter with a model gets the model's parameters there instead.
        """
        return None

    @property
    def max_model_len(self) -> int | None:
        """Longest context that the draft can read; None if it has no limit of its own."""
        return None

    @property
    def max_lag(self) -> int | None:
        """Maximum number of positions by which the draft cache may trail the committed prefix before a proposal.

        The prefix ends before the pending token. None for a drafter without a cache.
        """
        return None

    @property
    def lookahead(self) -> int:
        """Number of later tokens on which an entry of the draft cache depends, besides its own."""
        return 0

    @property
    def independent(self) -> bool:
        """Return whether the distribution at a place does not depend on the drafts before it."""
        return False

    @property
    def tree_width(self) -> int | None:
        """Number of drafts that are ranked after each node of a tree; None for a drafter of chains."""
        return None

    @property
    def reach(self) -> int:
        """Number of positions after the pending token that a round may write."""
        return self.num_speculative_tokens

    @property
    def passes(self) -> float:
        """Number of times that a round reads the draft's weights, except those that compute features."""
        return float(self.num_speculative_tokens)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose inputs the features are computed from. See `Decoder`."""
        return ()

    @property
    def features_width(self) -> int:
        """M, the size of the features kept for each of the target's positions; 0 for a drafter that reads none."""
        return 0

    def features(
        self, params: ModelParams, hidden: Float[Array, "B T E"], tapped: Sequence[Float[Array, "B T E"]]
    ) -> Float[Array, "B T M"]:
        """Compute the features to keep. hidden: output of the target's last norm. tapped: inputs of layers `taps`."""
        return hidden

    @abc.abstractmethod
    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        """Propose drafts. Return the proposal and the draft's pages after its passes."""

    def grow(
        self, params: ModelParams, cache: PagedKVCache, history: History, shape: Any, rank: Rank
    ) -> tuple[Proposal, Any, tuple[LayerCache, ...]]:
        """Propose a tree of `shape`. Return the proposal, the tree (`trees.growth.Grown`) and the pages.

        Needed only for a drafter that is not independent.

        Raises:
          UnsupportedError: the drafter grows no trees.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot propose trees: leave the tree options out")

    def prefill(self, params: ModelParams, cache: PagedKVCache, chunk: Chunk) -> tuple[LayerCache, ...]:
        """Write a chunk into the draft's pages and return them. The target's features of the chunk are in `cache`."""
        return cache.draft
