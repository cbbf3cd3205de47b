"""Weights quantised to 8 bits: integers, and a scale for every 32 integers of a row.

A scale is a power of two, so bfloat16 holds integer times scale exactly: reading returns exactly what was written.
Safetensors files hold integers and scales under the names of the compressed-tensors library (`NAME` and `NAME_scale`).
Orbax folders hold the products of integers and scales; orbax's compression makes the files nearly as small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.common.errors import UserError

GROUP = 32  # number of consecutive integers of a row that share a scale
LARGEST = 127  # largest magnitude of a quantised integer
SCALE = "_scale"  # suffix that turns the name of a quantised tensor into the name of its scales


def quantised(x: np.ndarray, name: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Quantise x f[..., I]. Return the integers i8[..., I] and the scales bf16[..., I / GROUP].

    The scale of a group is the smallest power of two such that 127 times the scale is at least the group's largest
    magnitude. No scale is below 2**-126. Each value is rounded to the nearest multiple of its scale.
    Raises: UserError, naming the tensor, for values that are not finite.
    """
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    if not np.isfinite(largest).all():
        raise UserError(
            f"tensor {name} holds values that are not finite, which no 8-bit format of jaxspec can represent"
        )
    mantissa, exponent = np.frexp(largest / np.float32(LARGEST))
    # The exponent is at least -126, because smaller scales would be subnormal, which some devices flush to 0.
    exponent = np.maximum(exponent - (mantissa == 0.5), -126)
    scale = np.ldexp(np.float32(1), exponent)
    whole = np.rint(groups / scale[..., None]).astype(np.int8)
    return whole.reshape(x.shape), scale.astype(jnp.bfloat16)


def dequantised(whole: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Dequantise integers i8[..., I], given a scale f[..., I] for each. The result has the dtype of `scale`."""
    return (whole.astype(np.float32) * scale.astype(np.float32)).astype(scale.dtype)


def rounded(x: np.ndarray, axis: int = -1, name: str = "") -> np.ndarray:
    """Return x f[...] rounded to values that the 8-bit format can represent, with groups of GROUP values along `axis`.

    axis: the axis that matrix products sum over. If GROUP does not divide its size, or x is a vector, x is returned
      unchanged.
    """
    if not fits(x.shape, axis):
        return x
    whole, scale = quantised(np.moveaxis(x, axis, -1), name)
    return np.moveaxis(dequantised(whole, np.repeat(scale, GROUP, axis=-1)), -1, axis).astype(x.dtype)


def fits(shape: tuple[int, ...], axis: int = -1) -> bool:
    """Return whether an array of this shape can be quantised: it has two axes or more, and GROUP divides its `axis`."""
    return len(shape) > 1 and shape[axis] % GROUP == 0


def split(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replace every matrix of floats, [O, I], by its quantised integers and, under a second name, their scales.

    Tensors that cannot be quantised (see `fits`) stay unchanged.
    """
    found: dict[str, Any] = {}
    for name, x in tensors.items():
        if x.dtype.kind in "iub" or not fits(x.shape):
            found[name] = x
        else:
            found[name], found[name + SCALE] = quantised(x, name)
    return found
