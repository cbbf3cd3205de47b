"""SamplingParams: the sampling parameters of one request. They are vLLM's where vLLM has such parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxspec.common.errors import UserError, quoted
from jaxspec.common.values import flag, ids, number, option, options, strings, whole

GREEDY_BELOW = 1e-5  # temperature below which decoding is greedy, as in vLLM
MAX_SAMPLES = 16_384  # maximum number of samples of a prompt, as in vLLM
MAX_LOGPROBS = 20  # maximum number of top ids with log-probabilities at each position, as in vLLM
MAX_LOGIT_BIAS = 100.0
SEEDS = (-(1 << 63), (1 << 64) - 1)  # limits of seeds, which are signed or unsigned integers of 64 bits

# Limits of the parameters that are whole numbers: (minimum, maximum), or (minimum,) for the maximum of
# `jaxspec.common.values`, LARGEST. None is allowed if it is the default.
COUNTS: dict[str, tuple[int, ...]] = {
    "n": (1, MAX_SAMPLES),
    "max_tokens": (0,),
    "min_tokens": (0,),
    "top_k": (-1,),
    "seed": SEEDS,
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "num_speculative_tokens": (0,),
}
HINTS = {"top_k": "; 0 turns it off", "num_speculative_tokens": "; 0 turns speculation off"}
# Limits of the other numbers: (minimum, maximum, both in words for messages). Devices compute in float32. Beyond the
# limits of temperature and repetition_penalty, the distribution of tokens may not be finite, or may change no more.
RANGES = {
    "temperature": (0.0, 1e6, "[0, 1e6]; 0 is greedy"),
    "top_p": (math.ulp(0.0), 1.0, "(0, 1]; 1 turns it off"),
    "min_p": (0.0, 1.0, "[0, 1]; 0 turns it off"),
    "repetition_penalty": (1e-3, 1e3, "[0.001, 1000]; 1 turns it off"),
    "presence_penalty": (-2.0, 2.0, "[-2, 2]; 0 turns it off"),
    "frequency_penalty": (-2.0, 2.0, "[-2, 2]; 0 turns it off"),
}
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "token_origins")


@options
class SamplingParams:
    """Sampling parameters of one request.

    Speculation does not change the distribution of the output, unless its acceptance rule is typical or synthetic.

    Raises: UserError for a value out of its range.
    """

    n: int = option("Samples of each prompt. They share the prompt's pages; sample 0 is what n=1 gives.", default=1)
    max_tokens: int = option("Longest output, in tokens. With prompt_logprobs it may be 0.", default=16)
    min_tokens: int = option("Shortest output, in tokens. No stop id and no stop string ends it earlier.", default=0)
    temperature: float = option("Divisor of the logits; 0 is greedy.", default=1.0)
    top_p: float = option(
        "Keep the most probable tokens that hold this probability. The filters apply after temperature, in the "
        "order min-p, top-k, top-p.",
        default=1.0,
    )
    top_k: int = option("Keep the k most probable tokens; 0 keeps all. -1 keeps all, too.", default=0)
    min_p: float = option("Keep tokens whose probability is at least this share of the highest one.", default=0.0)
    repetition_penalty: float = option(
        "Divide the positive logits of tokens that occur in prompt or output; 1 is off. Negative logits are "
        "multiplied.",
        default=1.0,
    )
    presence_penalty: float = option("Subtract this from the logits of tokens that occur in the output.", default=0.0)
    frequency_penalty: float = option(
        "Subtract this from a token's logit for each time it occurs in the output.",
        default=0.0,
    )
    logit_bias: Any = option(
        "Map of token ids to numbers from -100 to 100 that are added to their logits. Kept as sorted pairs.",
        default=None,
    )
    allowed_token_ids: tuple[int, ...] | list[int] | None = option(
        "Token ids that may be chosen; no others are.",
        default=None,
    )
    bad_words: str | tuple[str, ...] | list[str] = option(
        "Strings whose token sequences never occur in the output.",
        default=(),
    )
    seed: int | None = option(
        "Random seed of 64 bits that makes sampling reproducible. In float32 the output equals plain decoding "
        "with the same seed, whatever shares the batch and however many drafts are proposed. Under an explicit "
        "rejection_sample_method other than 'coupled' the output depends on num_speculative_tokens, and differs "
        "from plain decoding. -1 is no seed, as in vLLM.",
        default=None,
    )
    stop: str | tuple[str, ...] | list[str] = option("String, or several, that ends the output.", default=())
    stop_token_ids: tuple[int, ...] | list[int] = option("Token ids that end the output.", default=())
    ignore_eos: bool = option("Go on after the model's own end tokens.", default=False)
    include_stop_str_in_output: bool = option("Keep the stop string at the end of the text.", default=False)
    skip_special_tokens: bool = option("Leave special tokens out of the text.", default=True)
    logprobs: int | None = option(
        "Log-probabilities of each output token and of this many most probable ones. 0 gives the token's own "
        "alone. They come from the target's raw logits, as in vLLM.",
        default=None,
    )
    prompt_logprobs: int | None = option(
        "Log-probabilities of the prompt's tokens, as logprobs gives them of the output's.",
        default=None,
    )
    num_speculative_tokens: int | None = option(
        "Drafts a round for this request, at most the engine's; 0 turns speculation off.",
        default=None,
    )
    token_origins: bool = option(
        "Report of each output token whether it is an accepted draft token or the target's own, and its round.",
        default=False,
    )
    structured_outputs: Any = option(
        "Form of the output, a dict with one of json, json_object, regex and choice. docs/structured-outputs.md has "
        "them all.",
        default=None,
    )

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name, limits in COUNTS.items():
            value = getattr(self, name)
            if value is not None or DEFAULTS[name] is not None:
                put(name, whole(name, value, *limits, hint=HINTS.get(name, "")))
        if self.seed == -1:
            put("seed", None)
        for name, (least, most, words) in RANGES.items():
            put(name, value := number(name, getattr(self, name)))
            if not least <= value <= most:
                raise UserError(f"{name}={value} must lie in {words}")
        for name in FLAGS:
            put(name, flag(name, getattr(self, name)))
        for name in ("stop", "bad_words"):
            put(name, strings(name, () if getattr(self, name) is None else getattr(self, name)))
        put("stop_token_ids", ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids))
        put("logit_bias", bias_pairs(self.logit_bias))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", tuple(dict.fromkeys(ids("allowed_token_ids", self.allowed_token_ids))))
            if not self.allowed_token_ids:
                raise UserError("allowed_token_ids is empty and would allow nothing: leave it out to allow all")
        if self.structured_outputs is not None:
            from jaxspec.grammars.requests import StructuredOutputs  # imported here, so that --help stays fast

            put("structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise UserError("max_tokens=0 is below 1, and only a request with prompt_logprobs needs no output")
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens={self.min_tokens} is above max_tokens, {self.max_tokens}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Return whether top-k, top-p or min-p changes the distribution of tokens."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def processed(self) -> bool:
        """Return whether token ids are penalised, biased or forbidden. bad_words, which are strings, do not count."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return penalties or self.min_tokens > 0 or bool(self.logit_bias) or self.allowed_token_ids is not None


def bias_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """Return a logit_bias, given as a mapping or as pairs of (id, bias), as pairs sorted by token id.

    Ids may be strings, as in JSON. Raises: UserError for ids or biases out of their limits.
    """
    try:
        given = list(bias.items() if isinstance(bias, Mapping) else bias or ())
        pairs = [(int(i) if isinstance(i, str) and i.isdecimal() else i, value) for i, value in given]
    except (TypeError, ValueError):
        raise UserError(f"logit_bias={quoted(bias)} must map token ids to numbers") from None
    found: dict[int, float] = {}
    for i, value in pairs:
        i, value = whole("logit_bias id", i, 0), number(f"logit_bias of id {i}", value)
        if not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS:
            raise UserError(
                f"logit_bias of id {i} is {value}: it must lie in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]; "
                "allowed_token_ids forbids ids outright"
            )
        if i in found:
            raise UserError(f"logit_bias has id {i} twice: give each id once")
        found[i] = value
    return tuple(sorted(found.items()))


DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
