"""SamplingParams: one request's wishes. Names, defaults and meanings are vLLM's."""

from __future__ import annotations

import math

from jaxspec.options import options, refuse_unsupported

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in vLLM


@options
class SamplingParams:
    """How one request is decoded.

    Args:
      max_tokens: at most this many output tokens.
      temperature: 0 is greedy.
      top_k: keep the k likeliest ids; 0 or -1 keeps all. top_p: keep the likeliest ids that hold this much
        probability. min_p: keep ids at least this likely relative to the likeliest. Applied after temperature, in the
        order min-p, top-k, top-p.
      seed: makes the output reproducible, whatever shares the batch and however many drafts are proposed.
      stop: strings that end the output; stop_token_ids: ids that do. ignore_eos: the model's own end ids do not.
      include_stop_str_in_output, skip_special_tokens: of the text.
      num_speculative_tokens: drafts a round for this request, at most the engine's; 0 turns speculation off.

    Raises: ValueError for a value out of its range; NotImplementedError for a field that is not supported yet.
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
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
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
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]; 1 turns it off")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p} must lie in [0, 1]; 0 turns it off")
        if self.top_k < -1:
            raise ValueError(f"top_k={self.top_k} must be positive, or 0 to turn it off")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} is below 1")
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 0:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens} is negative; 0 turns speculation off"
            )
        if any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"stop={self.stop!r} must hold non-empty strings")
        later = "leave it at its default"
        names = "n min_tokens repetition_penalty presence_penalty frequency_penalty logit_bias allowed_token_ids"
        names += " bad_words logprobs prompt_logprobs"
        refuse_unsupported(self, dict.fromkeys(names.split(), later))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p takes part."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)
