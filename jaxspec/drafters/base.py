"""What every drafter takes and gives. A drafter is static (frozen, hashable); all arrays pass through its methods."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
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
    """K drafts a row, one after the other or as a tree.

    tokens i32[B,K]: their ids.
    probs f32[B,K,V]: the distribution each token was drawn from, or None where the proposal is deterministic (one-hot).
    num_proposed i32[B]: how many of the K are real in this round.
    draft_len i32[B]: positions that the draft's cache holds now, were all of them kept; None: it has no cache.
    tree: which of them comes after which, the likelier first; None: each after the one before.
    """

    tokens: jax.Array
    probs: jax.Array | None
    num_proposed: jax.Array
    draft_len: jax.Array | None = None
    tree: Topology | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class History:
    """What has been committed.

    tokens i32[B,_]: prompt and output.
    num_tokens i32[B]: how many they are.
    draft_len i32[B]: positions the draft cache holds.
    block_table i32[B,N]: page ids.
    num_wanted i32[B]: at most this many drafts.
    live bool[B]: the row takes part in this round.
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
    """A part of each prompt.

    tokens i32[B,T]: of prompts.
    length i32[B]: how many of them are real; 0: the row takes no part.
    start i32[B]: the position of the first.
    block_table i32[B,N]: page ids.
    next_tokens i32[B,T]: what follows each, where their log-probabilities are wanted.
    """

    tokens: jax.Array
    start: jax.Array
    length: jax.Array
    block_table: jax.Array
    next_tokens: jax.Array | None = None

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.tokens, self.start, self.length, self.block_table


# choose(head, hidden, drafts, i) -> (token, its distribution or None): samples a draft, after the first i of the
# round's, as each row asks. head: a `Head`, or what has its methods. The draft's vocabulary may be padded differently
# from the target's V, or be a reduced one; tokens and distributions are over the target's ids.
Choose = Callable[[Any, Float[Array, "B _"], Int[Array, "B K"], Any], tuple[Int[Array, " B"], Any]]

# rank(head, hidden, paths, i) -> (ids, scores): the likeliest drafts after each of k nodes, best first, and their log
# probabilities; paths i32[B,k,_]: the drafts that lead to each node, of which there are i.
Rank = Callable[
    [Any, Float[Array, "B k _"], Int[Array, "B k D"], Any], tuple[Int[Array, "B k w"], Float[Array, "B k w"]]
]

Params = Mapping[str, Any]  # {"target": ..., "draft": ..., "lent": ...}


def lender(params: Params) -> Mapping[str, Any]:
    """The target's parameters, as a draft reads them: some in a copy that lies as the draft does."""
    return {**params["target"], **params["lent"]} if "lent" in params else params["target"]


@dataclasses.dataclass(frozen=True)
class Drafter(abc.ABC):
    """A proposal method for num_speculative_tokens = K tokens a round. Each says what it needs by what it overrides."""

    num_speculative_tokens: int

    @property
    def backend(self) -> Any:
        """The backend of its passes: its model's; None for the target's."""
        return self.model.backend if hasattr(self, "model") else None

    def parameters(self) -> Any:
        """Return a pytree of arrays of its own, which its methods get as params["draft"]; None for none.

        A drafter with a model has the model's parameters there instead.
        """
        return None

    @property
    def max_model_len(self) -> int | None:
        """Longest context that it can read, None where it has no limit of its own."""
        return None

    @property
    def max_lag(self) -> int | None:
        """By how many positions its cache may lag behind the one before the pending token's when it proposes; None
        where it has no cache, which could not lag."""
        return None

    @property
    def lookahead(self) -> int:
        """How many tokens after its own an entry of its cache depends on."""
        return 0

    @property
    def independent(self) -> bool:
        """Whether what it says of a place does not depend on the drafts before that."""
        return False

    @property
    def tree_width(self) -> int | None:
        """How many drafts it weighs after each node of a tree; None: it proposes chains."""
        return None

    @property
    def reach(self) -> int:
        """How many positions after the pending token's a round may write."""
        return self.num_speculative_tokens

    @property
    def passes(self) -> float:
        """How often a round reads its weights, but for those that make its features."""
        return float(self.num_speculative_tokens)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose input its features are made of. See `Decoder`."""
        return ()

    @property
    def features_width(self) -> int:
        """M, the numbers that it keeps of each of the target's positions; 0: it reads nothing of them."""
        return 0

    def features(
        self, params: Params, hidden: Float[Array, "B T E"], tapped: tuple[Float[Array, "B T E"], ...]
    ) -> Float[Array, "B T M"]:
        """What it keeps of positions, of which hidden left the target's last norm."""
        return hidden

    @abc.abstractmethod
    def propose(
        self, params: Params, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        """-> (proposal, the draft's pages after its passes)."""

    def grow(
        self, params: Params, cache: PagedKVCache, history: History, shape: Any, rank: Rank
    ) -> tuple[Proposal, Any, tuple[LayerCache, ...]]:
        """As `propose`, and between the two the tree of `shape` that is kept (`jaxspec.drafters.trees.tree.Kept`), of a
        drafter that is not independent."""
        raise UnsupportedError(f"{type(self).__name__} grows no trees: drop the tree options")

    def prefill(self, params: Params, cache: PagedKVCache, chunk: Chunk) -> tuple[LayerCache, ...]:
        """The chunk into the draft's pages, the target's features of it being there; returns the pages."""
        return cache.draft
