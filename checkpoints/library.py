"""Access to the transformers library, which provides tokenizers and configurations."""

from __future__ import annotations

import importlib
import os
from typing import Any


def transformers() -> Any:
    """Import and return the transformers library, which takes seconds to import.

    The library's warning that no model can be used without torch is suppressed: jaxspec does not use its models.
    """
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1" if before is None else before
    try:
        return importlib.import_module("transformers")
    finally:
        if before is None:
            os.environ.pop(name, None)
