"""jaxspec: lossless speculative decoding for JAX, with many rounds in one run of a device program.

The public interface is the names below and what docs/ shows. All other modules and names may change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxspec.common.package import VERSION as __version__

if TYPE_CHECKING:  # imports that editors and type checkers see; a test compares them with _PUBLIC
    from jaxspec.api.async_llm import AsyncLLM as AsyncLLM
    from jaxspec.api.llm import LLM as LLM
    from jaxspec.api.one_call import generate as generate
    from jaxspec.api.outputs import CompletionOutput as CompletionOutput
    from jaxspec.api.outputs import Logprob as Logprob
    from jaxspec.api.outputs import RequestOutput as RequestOutput
    from jaxspec.api.outputs import StreamOutput as StreamOutput
    from jaxspec.common.errors import UnsupportedError as UnsupportedError
    from jaxspec.common.errors import UserError as UserError
    from jaxspec.engine.metrics import SpecDecodeMetrics as SpecDecodeMetrics
    from jaxspec.options.engine import EngineConfig as EngineConfig
    from jaxspec.options.sampling_params import SamplingParams as SamplingParams
    from jaxspec.options.speculative import SpeculativeConfig as SpeculativeConfig
    from jaxspec.parallel.hosts import join_hosts as join_hosts
else:
    # Public name -> its module, which is imported when the name is first used. Importing the modules now would make
    # `import checkpoints` circular.
    _PUBLIC = {
        "LLM": "jaxspec.api.llm",
        "AsyncLLM": "jaxspec.api.async_llm",
        "generate": "jaxspec.api.one_call",
        "join_hosts": "jaxspec.parallel.hosts",
        "SamplingParams": "jaxspec.options.sampling_params",
        "SpeculativeConfig": "jaxspec.options.speculative",
        "EngineConfig": "jaxspec.options.engine",
        "RequestOutput": "jaxspec.api.outputs",
        "CompletionOutput": "jaxspec.api.outputs",
        "StreamOutput": "jaxspec.api.outputs",
        "Logprob": "jaxspec.api.outputs",
        "SpecDecodeMetrics": "jaxspec.engine.metrics",
        "UserError": "jaxspec.common.errors",
        "UnsupportedError": "jaxspec.common.errors",
    }
    __all__ = ["__version__", *_PUBLIC]

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'jaxspec' has no attribute {name!r}; public names: {', '.join(_PUBLIC)}")
        return getattr(importlib.import_module(_PUBLIC[name]), name)

    def __dir__() -> list[str]:
        return sorted(__all__)
