"""jaxspec: lossless speculative decoding for JAX, many rounds in one device program.

The names below are the ones to use, with what docs/ shows besides; the rest of the packages may change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # what editors and type checkers see; a test holds that it is _PUBLIC
    from jaxspec.async_llm import AsyncLLM as AsyncLLM
    from jaxspec.config import EngineConfig as EngineConfig
    from jaxspec.config import SpeculativeConfig as SpeculativeConfig
    from jaxspec.errors import UnsupportedError as UnsupportedError
    from jaxspec.errors import UserError as UserError
    from jaxspec.llm import LLM as LLM
    from jaxspec.one_call import generate as generate
    from jaxspec.outputs import CompletionOutput as CompletionOutput
    from jaxspec.outputs import Logprob as Logprob
    from jaxspec.outputs import RequestOutput as RequestOutput
    from jaxspec.outputs import SpecDecodeMetrics as SpecDecodeMetrics
    from jaxspec.outputs import StreamOutput as StreamOutput
    from jaxspec.parallel.hosts import join_hosts as join_hosts
    from jaxspec.sampling_params import SamplingParams as SamplingParams
else:
    # Public name -> the module it lives in. Loaded on first use: `import checkpoints` first must be no circle.
    _PUBLIC = {
        "LLM": "jaxspec.llm",
        "AsyncLLM": "jaxspec.async_llm",
        "generate": "jaxspec.one_call",
        "join_hosts": "jaxspec.parallel.hosts",
        "SamplingParams": "jaxspec.sampling_params",
        "SpeculativeConfig": "jaxspec.config",
        "EngineConfig": "jaxspec.config",
        "RequestOutput": "jaxspec.outputs",
        "CompletionOutput": "jaxspec.outputs",
        "StreamOutput": "jaxspec.outputs",
        "Logprob": "jaxspec.outputs",
        "SpecDecodeMetrics": "jaxspec.outputs",
        "UserError": "jaxspec.errors",
        "UnsupportedError": "jaxspec.errors",
    }
    __all__ = ["__version__", *_PUBLIC]

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'jaxspec' has no attribute {name!r}; public names: {', '.join(_PUBLIC)}")
        return getattr(importlib.import_module(_PUBLIC[name]), name)

    def __dir__() -> list[str]:
        return sorted(__all__)
