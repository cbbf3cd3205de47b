"""Types of the values inside kernels."""

from typing import Any

import jax

Ref = Any  # a reference to an array: those of Triton and Mosaic kernels have no common public type
Refs = dict[str, Ref]  # references by the names of their arrays
Carry = tuple[jax.Array, ...]  # state of a running softmax: largest score, total weight, parts of the weighted sum
