"""Device kernels of speculative decoding: each op as plain jnp, Pallas for TPU and Pallas for GPU."""

import importlib.util
import sys
import types
import warnings

from pallas_kernels.feed_forward import feed_forward
from pallas_kernels.kv_write import kv_write
from pallas_kernels.likeliest_token import likeliest_token
from pallas_kernels.merge_tokens import merge_tokens
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.self_attention import self_attention
from pallas_kernels.slot_mapping import slot_mapping

# jax 0.11.2 and later say so of each kernel they lower. It tells its user nothing to act on: each op has a plain form
# behind its dispatch, and what the kernels' next form would take is this project's to see to (docs/notes/gpu.md).
TRITON_ENDS = "The Pallas Triton backend is deprecated"
warnings.filterwarnings("ignore", message=TRITON_ENDS, category=DeprecationWarning)

# MLIR asks Python for a module of each dialect, and where there is none, as of Triton's, has the path searched anew for
# every operation: a quarter of the lowering of a program for GPUs. So there is one, with nothing in it.
TRITON_DIALECT = "jaxlib.mlir.dialects.tt"
if TRITON_DIALECT not in sys.modules and importlib.util.find_spec(TRITON_DIALECT) is None:
    sys.modules[TRITON_DIALECT] = types.ModuleType(TRITON_DIALECT)

__all__ = [
    "feed_forward",
    "kv_write",
    "likeliest_token",
    "merge_tokens",
    "paged_attention",
    "self_attention",
    "slot_mapping",
]
