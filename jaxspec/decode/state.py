"""The input of a launch (one run of the device program, many rounds), the state that rounds carry, and the result."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxspec.drafters.base import Drafter
from jaxspec.models.paged import PagedModel
from jaxspec.options.engine import MAX_ROUNDS
from jaxspec.sampling.distribution import SamplingRows
from jaxspec.sampling.logprobs import Logprobs
from jaxspec.sampling.processors import PROCESSORS, Processors
from jaxspec.sampling.processors.base import Text
from jaxspec.verify.rules import RULES

# The models' parameters: {"target": ..., "draft": ..., "shared": ...}. If some row has a grammar, "grammars" holds the
# tables of grammars u16[_].
ModelParams = dict[str, Any]

# Values of DecodeState.finish. RUNNING: the row has not ended. NO_ID: the row failed, because no token id was allowed.
# NOT_FINITE: it failed, because the target's logits were not finite.
RUNNING, STOP, LENGTH, NO_ID, NOT_FINITE = range(5)
FINISH_REASONS = {RUNNING: None, STOP: "stop", LENGTH: "length", NO_ID: "error", NOT_FINITE: "error"}


@dataclasses.dataclass(frozen=True)
class Variant:
    """The code paths that a batch needs, or that a compiled program has. Static and hashable.

    A program serves the batches that need only paths that it has.

    rules: names of the acceptance rules of the batch's rows, except greedy.
    filters: whether some row uses top-k, top-p or min-p.
    logprobs: largest number of top ids whose log-probabilities a row requests; None if no row requests any.
    processors: whether some row has penalties, bias or forbidden ids.
    long_lists: whether some row's lists of ids exceed the usual size.
    grammars: whether some row has a grammar.
    """

    rules: frozenset[str] = frozenset()
    filters: bool = False
    logprobs: int | None = None
    processors: bool = False
    long_lists: bool = False
    grammars: bool = False

    @property
    def noises(self) -> set[str]:
        """The kinds of sampling noise that rows draw. An empty set means that all rows are greedy."""
        return {noise for noise in (RULES[name].noise for name in self.rules) if noise}

    @property
    def needs_q(self) -> bool:
        """Return whether some row's acceptance rule reads q, the draft's distribution."""
        return any(RULES[name].needs_q for name in self.rules)

    @property
    def processor_names(self) -> tuple[str, ...]:
        """Return the names of the logits processors that the program has, in their order."""
        return tuple(name for name in PROCESSORS if (self.grammars if name == "grammar" else self.processors))

    def __str__(self) -> str:
        flags = {
            "filters": self.filters,
            "penalties": self.processors,
            "long lists": self.long_lists,
            "grammars": self.grammars,
        }
        parts = [" ".join(sorted(self.rules)) or "greedy"]
        parts += [name for name, is_set in flags.items() if is_set]
        if self.logprobs is not None:
            parts.append(f"{self.logprobs} log-probabilities")
        return ", ".join(parts)

    def covers(self, other: Variant) -> bool:
        """Return whether a program with this variant's code paths also serves a batch that needs the other variant."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return all(b is None or (a is not None and a >= b) for a, b in zip(mine, theirs, strict=True))


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """The static configuration of a device program.

    drafter: the drafter; None for plain decoding, K = 0.
    variant: code paths that the program is compiled with.
    greedy_draft: whether the draft proposes its argmax token, with a one-hot distribution q.
    grammar_words: size of the array of grammars' tables; 0 for a program that reads none.
    reader: the drafter that reads the target's features; every target pass, also in plain decoding, stores features for
      it. None if the drafter reads no features.
    """

    target: PagedModel
    drafter: Drafter | None
    variant: Variant = Variant()
    greedy_draft: bool = False
    reader: Drafter | None = None
    grammar_words: int = 0

    @property
    def num_speculative_tokens(self) -> int:
        return self.drafter.num_speculative_tokens if self.drafter else 0

    @property
    def drafting(self) -> Any:
        """The backend (device and kernels) of the draft's passes."""
        return (self.drafter and self.drafter.backend) or self.target.backend

    @property
    def position_limit(self) -> int:
        """The smaller of the target's and the draft's context lengths. No draft token is proposed beyond this limit."""
        limit = self.target.max_model_len
        own = self.drafter.max_model_len if self.drafter else None
        return min(limit, own or limit)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class RowLimits:
    """The limits of each row.

    num_speculative_tokens i32[B]: the row's own maximum number of draft tokens a round.
    max_len i32[B]: maximum number of tokens of the row: prompt + max_tokens, at most max_model_len.
    stop_ids i32[B,_]: token ids that end the row, padded with -1.
    """

    num_speculative_tokens: jax.Array
    max_len: jax.Array
    stop_ids: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DecodeState:
    """The state that the loop over rounds carries.

    Row b has num_tokens[b] committed tokens. The last of them is called pending: its keys and values are not in the
    target cache yet, and the next target pass computes them. That cache is valid for positions [0, num_tokens - 1).

    tokens i32[B,_]: tokens of prompt and output.
    num_tokens i32[B]: number of committed tokens.
    draft_len i32[B]: number of valid positions of the draft cache.
    finish i32[B]: RUNNING, or the reason why the row ended.
    without_drafts bool[B]: whether the row's next round runs without draft tokens, because the last round's logits were
      not finite and its draft tokens may have caused this.
    round i32[]: number of rounds done in this launch.
    rounds_of i32[B]: number of rounds in which the row gained a token; a counter, so that no round sums up `log`.
    log i32[B, 4, MAX_ROUNDS]: numbers of draft tokens proposed, draft tokens committed, tokens committed, and first
      draft tokens that prompt lookup found before another method's, by round.
    processing: states of the batch's logits processors (such as penalties), by name.
    logprobs: log-probabilities of the launch's new tokens; None if no row requests them.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    draft_len: jax.Array
    finish: jax.Array
    without_drafts: jax.Array
    round: jax.Array
    rounds_of: jax.Array
    log: jax.Array
    processing: dict[str, Any]
    logprobs: Logprobs | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Control:
    """The conditions that end a launch.

    num_rounds i32[]: maximum number of rounds, at most MAX_ROUNDS.
    max_ends i32[]: number of finished rows at which the launch ends.
    worth f32[]: number of tokens that plain decoding would give a row in the time of one round. The launch ends if the
      rows gain clearly fewer, so that the host can choose another K.
    """

    num_rounds: jax.Array
    max_ends: jax.Array
    worth: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LaunchInput:
    """The arrays that describe a batch, sent from the host to the device at each launch.

    tokens, num_tokens, draft_len: initial values of the `DecodeState`.
    live bool[B]: whether the row holds a request.
    block_table i32[B,N]: page ids; unassigned entries hold num_pages.
    prompt_len i32[B]: number of tokens of the prompt.
    processors: the logits processors (such as penalties) that some row uses, by name.
    rule_options f32[_]: values of the acceptance rule's own options.
    active i32[_]: rows that the first round runs. The others are spare: each takes the place of a row that ends.
    window_table i32[B,N]: page ids of layers with a window, if these have a pool of their own; else None.
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
    active: jax.Array
    control: Control
    window_table: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Context:
    """The constants of a launch. Only the caches and the DecodeState change from round to round.

    tables: precomputed tables of the logits processors in batch.processors, by name.
    capacity i32[B]: number of positions for which the row has pages.
    """

    config: DecodeConfig
    params: ModelParams
    batch: LaunchInput
    tables: dict[str, Any]
    capacity: jax.Array

    @property
    def only_argmax(self) -> bool:
        """Return whether all rows need only the argmax of the target's logits."""
        variant = self.config.variant
        return not variant.noises and not self.batch.processors and variant.logprobs is None


def text_of(config: DecodeConfig, batch: LaunchInput, tokens: jax.Array, num_tokens: jax.Array) -> Text:
    """Return the committed text, in the form that logits processors read."""
    return Text(tokens, num_tokens, batch.prompt_len, batch.limits.stop_ids, config.target.config.vocab_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LaunchResult:
    """The result of one launch, copied to the host in one transfer.

    new_tokens i32[B, MAX_ROUNDS*(K+1)]: the tokens that the row gained in this launch, then padding.
    num_new i32[B]: number of tokens in new_tokens without padding.
    finish, draft_len: as in DecodeState.
    proposed, accepted, emitted, looked_up i32[B, MAX_ROUNDS]: the four parts of DecodeState.log, in its order.
    num_rounds i32[]: number of rounds that ran.
    logprobs: log-probabilities of new_tokens; None if no row requests them.
    """

    new_tokens: jax.Array
    num_new: jax.Array
    finish: jax.Array
    draft_len: jax.Array
    proposed: jax.Array
    accepted: jax.Array
    emitted: jax.Array
    looked_up: jax.Array
    num_rounds: jax.Array
    logprobs: Logprobs | None = None

    @property
    def num_speculative_tokens(self) -> int:
        return self.new_tokens.shape[1] // MAX_ROUNDS - 1
