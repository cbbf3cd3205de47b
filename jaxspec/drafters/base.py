"""What every drafter takes and gives. A drafter is static (frozen, hashable); all arrays pass through propose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

from jaxspec.models.decoder import Decoder
from jaxspec.shapes import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Proposal:
    """K drafts a row.

    tokens i32[B,K]: their ids.
    probs f32[B,K,V]: the distribution each token was drawn from, or None where the proposal is deterministic (one-hot).
    num_proposed i32[B]: how many of the K are real in this round.
    """

    tokens: jax.Array
    probs: jax.Array | None
    num_proposed: jax.Array


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


# choose(decoder, hidden, drafts, i) -> (token, its distribution or None): samples a draft, after the first i of the
# round's, as each row asks. The draft's vocabulary may be padded differently from the target's V, or be a reduced one;
# tokens and distributions are over the target's ids.
Choose = Callable[[Decoder, Float[Array, "B _"], Int[Array, "B K"], Any], tuple[Int[Array, " B"], Any]]


class Drafter(Protocol):
    """A proposal method for num_speculative_tokens = K tokens a round."""

    @property
    def num_speculative_tokens(self) -> int: ...

    @property
    def max_model_len(self) -> int | None:
        """Longest context the drafter can read, None where it has no limit of its own."""
        ...

    def propose(self, params: Any, pages: Any, history: History, choose: Choose) -> tuple[Proposal, Any]:
        """-> (proposal, the draft's pages after its passes)."""
        ...

    def prefill(self, params: Any, pages: Any, chunk: Chunk) -> Any:
        """The chunk into the draft's pages; returns the pages."""
        ...
