"""The options of the acceptance rule "typical". This module makes no array, so that it does not load JAX."""

from __future__ import annotations

from typing import Any

from jaxspec.common.errors import UserError
from jaxspec.common.values import number

DEFAULTS = {"posterior_threshold": 0.09, "posterior_alpha": 0.3}  # default values of the options, which are Medusa's


def checked(config: Any) -> dict[str, float]:
    """Return the rule's options in a SpeculativeConfig, defaults filled in. Raise UserError for one not in (0, 1]."""
    found = {}
    for name, default in DEFAULTS.items():
        value = getattr(config, name)
        found[name] = default if value is None else number(name, value)
        if not 0.0 < found[name] <= 1.0:
            raise UserError(f"{name}={found[name]} must lie in (0, 1]")
    return found
