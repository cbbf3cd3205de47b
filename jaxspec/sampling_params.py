"""SamplingParams: one request's wishes. Names, defaults and meanings are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.options import options

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in vLLM
MAX_LOGPROBS = 20  # most alternatives that can be asked for a token, as in vLLM
MAX_LOGIT_BIAS = 100.0


@options
class SamplingParams:
    """How one request is decoded. With speculation or without, the output obeys the same law.

    Args:
      n: samples of the prompt; they share its pages. Sample 0 is what n=1 gives.
      max_tokens: at most this many output tokens; min_tokens: no stop id and no stop string ends the output before.
      temperature: 0 is greedy.
      top_k: keep the k likeliest ids; 0 or -1 keeps all. top_p: keep the likeliest ids that hold this much
        probability. min_p: keep ids at least this likely relative to the likeliest. Applied after temperature, in the
        order min-p, top-k, top-p.
      repetition_penalty: divides positive (multiplies negative) logits of ids in prompt or output; 1 is off.
      presence_penalty, frequency_penalty: subtracted from the logits of ids in the output, once or once an occurrence.
      logit_bias: id -> what is added to its logit, -100 to 100 (kept as sorted pairs). allowed_token_ids: no other id
        is chosen. bad_words: strings whose tokens never occur in the output.
      seed: makes the output reproducible, whatever shares the batch and however many drafts are proposed.
      stop: strings that end the output; stop_token_ids: ids that do. ignore_eos: the model's own end ids do not.
      include_stop_str_in_output, skip_special_tokens: of the text.
      logprobs: log-probabilities of each output token and of this many likeliest ids (0: of the token alone);
        prompt_logprobs: the same of the prompt's tokens. Of the target's raw logits, as in vLLM.
      num_speculative_tokens: drafts a round for this request, at most the engine's; 0 turns speculation off.

    Raises: ValueError for a value out of its range.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: str | tuple[str, ...] | list[str] = ()
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)
        put("stop", strings("stop", self.stop))
        put("bad_words", strings("bad_words", self.bad_words))
        put("stop_token_ids", tuple(self.stop_token_ids or ()))
        put("logit_bias", bias_pairs(self.logit_bias))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", tuple(dict.fromkeys(self.allowed_token_ids)))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is empty and would allow nothing: leave it out to allow all")
        between("n", self.n, 1, None)
        between("max_tokens", self.max_tokens, 1, None)
        between("min_tokens", self.min_tokens, 0, self.max_tokens, "max_tokens")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]; 1 turns it off")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p} must lie in [0, 1]; 0 turns it off")
        if self.top_k < -1:
            raise ValueError(f"top_k={self.top_k} must be positive, or 0 to turn it off")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be positive; 1 turns it off")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [-2, 2]; 0 turns it off")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                between(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 0:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens} is negative; 0 turns speculation off"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p takes part."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def processed(self) -> bool:
        """Whether ids are penalised, biased or forbidden; bad_words, which are strings, apart."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return penalties or self.min_tokens > 0 or bool(self.logit_bias) or self.allowed_token_ids is not None


def strings(name: str, value: Any) -> tuple[str, ...]:
    """One string or several, none of them empty."""
    listed = (value,) if isinstance(value, str) else tuple(value or ())
    if any(not isinstance(s, str) or not s for s in listed):
        raise ValueError(f"{name}={listed!r} must hold non-empty strings")
    return listed


def bias_pairs(bias: Mapping[int, float] | Iterable[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    """Hashable, sorted by id."""
    pairs = tuple(sorted((int(i), float(value)) for i, value in dict(bias or {}).items()))
    for i, value in pairs:
        if not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias of id {i} is {value}: it must lie in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]; "
                "allowed_token_ids forbids ids outright"
            )
    return pairs


def between(name: str, value: int, least: int, most: int | None, limit: str = "the limit") -> None:
    if value < least:
        raise ValueError(f"{name}={value} is below {least}")
    if most is not None and value > most:
        raise ValueError(f"{name}={value} is above {limit}, {most}")
