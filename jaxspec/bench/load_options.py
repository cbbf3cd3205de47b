"""Options of the stage `load` of `jaxspec bench`."""

from __future__ import annotations

import dataclasses

from jaxspec.common.errors import UserError
from jaxspec.common.values import documented, option


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The workload of the stage `load`. The first sentence of each entry is its --help text."""

    requests: int = option("Number of requests of the load stage.", default=256)
    prompt_tokens: tuple[int, ...] = option(
        "Shortest and longest prompt of the load stage, in tokens.",
        default=(128, 1024),
    )
    output_tokens: tuple[int, ...] = option(
        "Shortest and longest answer of the load stage, in tokens.",
        default=(64, 256),
    )
    rate: float = option("Requests per second of the load stage; 0: all at once.", default=0.0)
    texts: tuple[str, ...] = option("Prompts in place of random ids.", default=())
    max_model_len: int | None = option(
        "Longest context of the load stage's engine; default: the longest request.",
        default=None,
    )
    runs: int = option("Runs of the load stage; programs are compiled in the first.", default=3)
    seed: int = option("Random seed for the load stage.", default=0)

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
