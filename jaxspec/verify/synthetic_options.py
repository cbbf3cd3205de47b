"""The options of the acceptance rule "synthetic". This module makes no array, so that it does not load JAX."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxspec.common.errors import UserError, quoted
from jaxspec.common.values import number

NAMES = ("synthetic_acceptance_rates", "synthetic_acceptance_length")


def checked(config: Any) -> dict[str, tuple[float, ...]]:
    """Return the acceptance rates that a SpeculativeConfig asks for: P(at least i drafts are accepted) for i = 1..K.

    Raises:
      UserError: if both or neither of rates and mean acceptance length are given, or a value is out of its range.
    """
    k = config.num_speculative_tokens
    rates = config.synthetic_acceptance_rates
    length = config.synthetic_acceptance_length
    if (rates is None) == (length is None):
        raise UserError(
            "rejection_sample_method='synthetic' needs one of synthetic_acceptance_length and "
            "synthetic_acceptance_rates"
        )
    return {"synthetic_acceptance_rates": of_length(length, k) if rates is None else of_rates(rates, k)}


def of_length(length: Any, k: int) -> tuple[float, ...]:
    """Return k acceptance rates that give this mean acceptance length. Raise UserError if it is not in [1, k + 1]."""
    length = number("synthetic_acceptance_length", length)
    if not 1.0 <= length <= k + 1:
        raise UserError(f"synthetic_acceptance_length={length} must lie in [1, K + 1 = {k + 1}]")
    return tuple(min(max(length - 1 - i, 0.0), 1.0) for i in range(k))


def of_rates(rates: Any, k: int) -> tuple[float, ...]:
    """Return acceptance rates as a tuple of floats. Raise UserError unless they are k non-increasing probabilities."""
    if not isinstance(rates, Iterable) or isinstance(rates, str | bytes):
        raise UserError(f"synthetic_acceptance_rates={quoted(rates)} must be a list of {k} probabilities")
    rates = tuple(number("synthetic_acceptance_rates", r) for r in rates)
    if len(rates) != k or any(not 0.0 <= r <= 1.0 for r in rates) or list(rates) != sorted(rates, reverse=True):
        raise UserError(
            f"synthetic_acceptance_rates={rates} must be {k} probabilities that do not increase: the chances that "
            "the first 1, 2, ... drafts are accepted"
        )
    result: tuple[float, ...] = rates
    return result
