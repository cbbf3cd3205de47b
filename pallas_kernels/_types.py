"""Types of the values inside kernels."""

from typing import Any

import jax

Ref = Any  # a kernel's reference to an array; references in Triton and Mosaic kernels have no common public type
Refs = dict[str, Ref]  # a kernel's references, by the names of their arrays
Carry = tuple[jax.Array, ...]  # the state of a running softmax: largest score, total weight, parts of the weighted sum
