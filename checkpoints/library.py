"""transformers, of which tokenizers and configurations are used."""

from __future__ import annotations

import importlib
import os
from typing import Any


def transformers() -> Any:
    """The library, which is slow to import. Where torch is missing it would say that no model can be used."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    told = os.environ.get(name)
    os.environ[name] = "1" if told is None else told
    try:
        return importlib.import_module("transformers")
    finally:
        if told is None:
            os.environ.pop(name, None)
