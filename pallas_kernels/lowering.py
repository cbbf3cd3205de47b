"""Lowering of programs that contain GPU kernels."""

import contextlib
import functools
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator

# The beginning of the warning that jax 0.11.2 and later give for each Triton kernel. Users cannot act on the warning:
# without the backend each op would use plain jnp, and porting the kernels is this project's task (docs/notes/gpu.md).
TRITON_ENDS = "The Pallas Triton backend is deprecated"
TRITON_DIALECT = "jaxlib.mlir.dialects.tt"


@contextlib.contextmanager
def quick_lowering() -> Iterator[None]:
    """Suppress jax's warning about Triton, and MLIR's search for Triton's dialect, while GPU programs are lowered.

    MLIR asks Python for a module of each dialect. Triton's dialect has no module, so MLIR searches Python's path again
    for every operation, which takes a quarter of the time of lowering. An empty module, present inside the context,
    ends the search.
    Warning filters and modules belong to the process, so only one thread at a time may be inside the context.
    """
    needs_module = TRITON_DIALECT not in sys.modules and not dialect_exists()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=TRITON_ENDS, category=DeprecationWarning)
        if needs_module:
            sys.modules[TRITON_DIALECT] = types.ModuleType(TRITON_DIALECT)
        try:
            yield
        finally:
            if needs_module:
                sys.modules.pop(TRITON_DIALECT, None)


@functools.cache
def dialect_exists() -> bool:
    """Return whether jaxlib has a Python module for Triton's MLIR dialect."""
    return importlib.util.find_spec(TRITON_DIALECT) is not None
