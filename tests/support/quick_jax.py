"""A change of JAX's inside that makes lowering quicker, for tests only."""

from __future__ import annotations

import threading
from typing import Any

from jax._src.interpreters import mlir


def keep_contexts() -> None:
    """Lower all programs of a thread in one MLIR context.

    JAX makes a context for each program. For one operation that takes longer than the rest of lowering, and tests lower
    thousands of these.
    """
    make, kept = getattr(mlir, "make_ir_context", None), threading.local()

    def context() -> Any:
        if not hasattr(kept, "context"):
            kept.context = make()
        return kept.context

    if make:  # else a later JAX, which is as slow as it is
        mlir.make_ir_context = context
