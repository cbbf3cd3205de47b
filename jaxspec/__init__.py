"""jaxspec: lossless speculative decoding for JAX, many rounds in one device program."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> the module it lives in. Loaded on first use: `import checkpoints` first must be no circle.
_PUBLIC = {
    "LLM": "jaxspec.llm",
    "AsyncLLM": "jaxspec.async_llm",
    "generate": "jaxspec.llm",
    "SamplingParams": "jaxspec.sampling_params",
    "SpeculativeConfig": "jaxspec.config",
    "RequestOutput": "jaxspec.outputs",
    "CompletionOutput": "jaxspec.outputs",
    "SpecDecodeMetrics": "jaxspec.outputs",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}; public names: {', '.join(_PUBLIC)}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
