"""The values that all processes of a job must agree on."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.options.engine import EngineConfig
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.runtime.program_files import sources


def listed(model: str, config: EngineConfig, speculative: SpeculativeConfig | None) -> dict[str, Any]:
    """Return the values that must be the same in all processes of a job, by name: options and a digest of the code."""
    drafts = dataclasses.asdict(speculative) if speculative else {}
    own = {f"speculative_config.{name}": value for name, value in drafts.items()}
    return {"model": model, **dataclasses.asdict(config), **own, "source code": sources()}
