"""What goes into a launch of the device program, what it carries, and what comes back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxspec.drafters.base import Drafter
from jaxspec.models.paged import PagedModel
from jaxspec.options.engine import MAX_ROUNDS
from jaxspec.sampling.distribution import SamplingRows
from jaxspec.sampling.logprobs import Logprobs
from jaxspec.sampling.processors import Processors
from jaxspec.verify.rules import RULES

Params = dict[str, Any]  # {"target": ..., "draft": ...}

# Values of DecodeState.finish. NO_ID: none was allowed; NO_LAW: the target's logits were no numbers.
RUNNING, STOP, LENGTH, NO_ID, NO_LAW = range(5)
FINISH_REASONS = {RUNNING: None, STOP: "stop", LENGTH: "length", NO_ID: "error", NO_LAW: "error"}


@dataclasses.dataclass(frozen=True)
class Variant:
    """Which code paths a batch needs. Few, named and static: a batch that asks for none of a feature pays nothing.

    rules: acceptance rules that some row is under, beside greedy.
    filters: some row uses top-k, top-p or min-p.
    logprobs: some row wants log-probabilities, with this many likeliest ids; None: no row does.
    processors: some row has penalties, bias or forbidden ids.
    long_lists: some row has longer lists of ids than most.
    """

    rules: frozenset[str] = frozenset()
    filters: bool = False
    logprobs: int | None = None
    processors: bool = False
    long_lists: bool = False

    @property
    def noises(self) -> set[str]:
        """What rows draw with. Without any the launch is greedy: nothing is drawn."""
        return {noise for name in self.rules if (noise := RULES[name].noise)}

    @property
    def needs_q(self) -> bool:
        return any(RULES[name].needs_q for name in self.rules)

    def __str__(self) -> str:
        said = {"filters": self.filters, "penalties": self.processors, "long lists": self.long_lists}
        ranked = [] if self.logprobs is None else [f"{self.logprobs} log-probabilities"]
        return " ".join([*sorted(self.rules)] or ["greedy"]) + "".join(
            f", {w}" for w in [*filter(said.get, said), *ranked]
        )

    def covers(self, other: Variant) -> bool:
        """Whether a program for this one serves the other too."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return all(b is None or (a is not None and a >= b) for a, b in zip(mine, theirs, strict=True))


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Static description of the device program.

    drafter: None for plain decoding, K = 0.
    greedy_draft: the draft proposes its own likeliest token, as if certain of it.
    reader: the drafter for which target passes keep features, those of plain rounds too; or None.
    """

    target: PagedModel
    drafter: Drafter | None
    variant: Variant = Variant()
    greedy_draft: bool = False
    reader: Drafter | None = None

    @property
    def num_speculative_tokens(self) -> int:
        return self.drafter.num_speculative_tokens if self.drafter else 0

    @property
    def drafting(self) -> Any:
        """The backend of the draft's passes."""
        return (self.drafter and self.drafter.backend) or self.target.backend

    @property
    def position_limit(self) -> int:
        """Drafting stops short of both models' context lengths."""
        own = self.drafter.max_model_len if self.drafter else None
        return min(self.target.max_model_len, own or self.target.max_model_len)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class RowLimits:
    """What a row may be given.

    num_speculative_tokens i32[B]: the row's own K.
    max_len i32[B]: prompt + max_tokens, at most max_model_len.
    stop_ids i32[B,_]: ids that end the row, padded with -1.
    """

    num_speculative_tokens: jax.Array
    max_len: jax.Array
    stop_ids: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DecodeState:
    """The loop's carry. Row b has num_tokens[b] committed tokens, of which the last is pending: its keys and values are
    computed by the next target pass, so the target cache is valid for [0, num_tokens - 1).

    tokens i32[B,_]: prompt and output.
    num_tokens i32[B]: how many they are.
    draft_len i32[B]: valid positions of the draft cache.
    finish i32[B]: RUNNING, or why the row ended.
    spoilt bool[B]: the last round's logits were no numbers, which may be its drafts' doing, so that the next goes
      without.
    round i32[]: rounds done in this launch.
    rounds_of i32[B]: those in which the row gained a token, not summed up from the log each time.
    log i32[3, B, MAX_ROUNDS]: in each round, drafts proposed, drafts committed, tokens committed.
    processing: the states of the batch's processors, by name.
    logprobs: of the launch's new tokens, where some row wants them.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    draft_len: jax.Array
    finish: jax.Array
    spoilt: jax.Array
    round: jax.Array
    rounds_of: jax.Array
    log: jax.Array
    processing: dict[str, Any]
    logprobs: Logprobs | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Control:
    """When a launch ends.

    num_rounds i32[]: after so many rounds, at most MAX_ROUNDS.
    max_ends i32[]: as soon as so many rows have finished.
    worth f32[]: when the rows gain less than so many tokens a round, which is what plain decoding would have made in
      the same time, so that the host may choose another K.
    """

    num_rounds: jax.Array
    max_ends: jax.Array
    worth: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LaunchInput:
    """A batch as the host describes it.

    live bool[B]: the row holds a request.
    block_table i32[B,N]: page ids; unassigned entries hold num_pages.
    prompt_len i32[B]: how many of the tokens are the prompt's.
    processors: by name; empty where no row asks for any.
    rule_options f32[_]: the numbers of the rule's own options.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    draft_len: jax.Array
    live: jax.Array
    block_table: jax.Array
    sampling: SamplingRows
    limits: RowLimits
    prompt_len: jax.Array
    processors: Processors
    rule_options: jax.Array
    control: Control


@dataclasses.dataclass(frozen=True)
class Context:
    """What stays as it is throughout a launch. What varies from round to round is the caches and the DecodeState.

    tables: of batch.processors, by name.
    capacity i32[B]: positions that each row has pages for.
    """

    config: DecodeConfig
    params: Params
    batch: LaunchInput
    tables: dict[str, Any]
    capacity: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LaunchResult:
    """What one launch brings back, in one transfer.

    new_tokens i32[B, MAX_ROUNDS*(K+1)].
    num_new i32[B]: how many of them are real.
    finish, draft_len: as in DecodeState.
    proposed, accepted, emitted i32[B, MAX_ROUNDS]: its log.
    num_rounds i32[]: how many were run.
    logprobs: of new_tokens, where asked for.
    """

    new_tokens: jax.Array
    num_new: jax.Array
    finish: jax.Array
    draft_len: jax.Array
    proposed: jax.Array
    accepted: jax.Array
    emitted: jax.Array
    num_rounds: jax.Array
    logprobs: Logprobs | None = None

    @property
    def num_speculative_tokens(self) -> int:
        return self.new_tokens.shape[1] // MAX_ROUNDS - 1
