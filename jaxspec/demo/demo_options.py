"""Options of `jaxspec demo`, checked before anything is loaded."""

from __future__ import annotations

import dataclasses

from jaxspec.common import embedded
from jaxspec.common.errors import UserError
from jaxspec.common.values import documented, one_of, option
from jaxspec.options.engine import DTYPES, EngineConfig
from jaxspec.options.quantization import check_quantization
from jaxspec.options.sampling_params import SamplingParams

LONGEST = 2048  # largest number of tokens of a prompt and its answer together
PROMPT = 256  # largest number of tokens of a prompt


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of `jaxspec demo`. The first sentence of each entry is its --help text."""

    max_tokens: int = option("Longest answer to each prompt, in tokens.", default=64)
    draft: str = option("Draft model or head for the demo's target.", default=embedded.DRAFT)
    dtype: str = option("Compute dtype, as in EngineConfig.", default=EngineConfig.dtype)
    quantization: str | None = option(
        "Form of the weights of target and draft, such as int8; default: none.", default=None
    )
    compare_transformers: bool = option("Answer with transformers too (needs torch).", default=False)

    def __post_init__(self) -> None:
        SamplingParams(max_tokens=self.max_tokens)  # raises UserError for an invalid value
        if self.max_tokens > LONGEST - PROMPT:
            raise UserError(
                f"max_tokens={self.max_tokens} is above {LONGEST - PROMPT}: the demo holds {LONGEST} tokens, "
                f"{PROMPT} of them for the prompt"
            )
        one_of("dtype", self.dtype, DTYPES)
        check_quantization("quantization", self.quantization)

    @property
    def max_model_len(self) -> int:
        return PROMPT + self.max_tokens
