"""How annotations are checked in tests."""

from __future__ import annotations

from collections.abc import Callable

from beartype import beartype


def function(f: Callable) -> Callable:
    """beartype, except for what jaxtyping makes of a dataclass: its fields hold numpy arrays on the host and, while jax
    takes it apart and puts it together again, anything."""
    return f if f.__name__ == "__init__" else beartype(f)
