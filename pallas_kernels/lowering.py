"""Lowering of programs that hold kernels for GPUs."""

import contextlib
import functools
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator

# jax 0.11.2 and later warn of each kernel that they lower. It tells the user nothing to act on: each op has a plain
# form behind its dispatch, and the kernels' next form is this project's to write (docs/notes/gpu.md).
TRITON_ENDS = "The Pallas Triton backend is deprecated"
TRITON_DIALECT = "jaxlib.mlir.dialects.tt"


@contextlib.contextmanager
def quick_lowering() -> Iterator[None]:
    """Lower programs inside: without jax's warning of Triton, and without MLIR's search for Triton's dialect.

    MLIR asks Python for a module of each dialect. Where there is none, as of Triton's, it searches the path for every
    operation, which takes a quarter of the lowering of a program for GPUs. So there is an empty module meanwhile.
    Warning filters and modules belong to the process: only one thread may be inside at a time.
    """
    stands_in = TRITON_DIALECT not in sys.modules and not dialect_exists()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=TRITON_ENDS, category=DeprecationWarning)
        if stands_in:
            sys.modules[TRITON_DIALECT] = types.ModuleType(TRITON_DIALECT)
        try:
            yield
        finally:
            if stands_in:
                sys.modules.pop(TRITON_DIALECT, None)


@functools.cache
def dialect_exists() -> bool:
    return importlib.util.find_spec(TRITON_DIALECT) is not None
