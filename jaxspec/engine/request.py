"""One request's life: what was asked, what has been decoded, which pages it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxspec.outputs import SpecDecodeMetrics
from jaxspec.sampling_params import SamplingParams

# Looks at the output ids from this index on; returns how many output ids to keep, or None to go on.
FindStop = Callable[[list[int], int], int | None]


@dataclasses.dataclass
class Request:
    """prompt: token ids; seed: 64 bits, fixed for the request's life; coupled: which acceptance rule its sampling
    uses; stop_ids: ids that end it; max_len: prompt + output at most."""

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    coupled: bool
    stop_ids: tuple[int, ...]
    max_len: int
    num_speculative_tokens: int
    find_stop: FindStop | None = None

    output: list[int] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    draft_len: int = 0
    finish_reason: str | None = None
    metrics: SpecDecodeMetrics = dataclasses.field(default_factory=SpecDecodeMetrics)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)
