"""Options of the stage `load` of `jaxspec bench`."""

from __future__ import annotations

import dataclasses

from jaxspec.common.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The workload of the stage `load`. The first sentence of each entry is its --help text.

    Args:
      requests: Number of requests of the load stage.
      prompt_tokens: Shortest and longest prompt of the load stage, in tokens.
      output_tokens: Shortest and longest answer of the load stage, in tokens.
      rate: Requests per second of the load stage; 0: all at once.
      texts: Prompts in place of random ids.
      max_model_len: Longest context of the load stage's engine; default: the longest request.
      runs: Runs of the load stage; programs are compiled in the first.
      seed: Random seed for the load stage.
    """

    requests: int = 256
    prompt_tokens: tuple[int, ...] = (128, 1024)
    output_tokens: tuple[int, ...] = (64, 256)
    rate: float = 0.0
    texts: tuple[str, ...] = ()
    max_model_len: int | None = None
    runs: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "runs"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} is below 1")
        for name in ("prompt_tokens", "output_tokens"):
            first, *last = getattr(self, name)
            if len(last) > 1 or (last and last[0] < first):
                raise UserError(f"--{name.replace('_', '-')}: give the shortest and the longest, 128,1024")
        if self.texts and self.prompt_tokens != Load.prompt_tokens:
            raise UserError("--prompt-tokens is the length of random prompts, --prompts gives others: drop one of them")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed} is below 0")
        if not 0 <= self.rate < float("inf"):
            raise UserError(f"--rate {self.rate} must be 0 or more requests a second")
