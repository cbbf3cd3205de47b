"""Weights of 8 bits: integers, and a scale for every 32 integers of a row.

A scale is a power of two, so bfloat16 holds integer times scale exactly: reading returns exactly what was written.
Safetensors files hold both tensors under the names of the compressed-tensors library (`NAME` and `NAME_scale`). Orbax
folders hold the products; its compression makes them nearly as small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.common.errors import UserError

GROUP = 32  # integers that share a scale
LARGEST = 127  # magnitude of an integer
SCALE = "_scale"  # suffix of the name of a tensor's scales


def quantised(x: np.ndarray, name: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Quantise x f[..., I]. Return the integers i8[..., I] and the scales bf16[..., I / GROUP].

    The scale of a group is the smallest power of two of which 127 reach the group's largest magnitude. Each integer
    represents the nearest multiple of the scale.
    Raises: UserError, naming the tensor, for values that are not finite.
    """
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    if not np.isfinite(largest).all():
        raise UserError(f"tensor {name} holds numbers that are not finite: 8 bits have none for them")
    mantissa, exponent = np.frexp(largest / np.float32(LARGEST))
    # Smaller scales are subnormal: some devices flush them to 0.
    exponent = np.maximum(exponent - (mantissa == 0.5), -126)
    scale = np.ldexp(np.float32(1), exponent)
    whole = np.rint(groups / scale[..., None]).astype(np.int8)
    return whole.reshape(x.shape), scale.astype(jnp.bfloat16)


def dequantised(whole: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Dequantise integers i8[..., I] with a scale for each, f[..., I]. The result has the dtype of `scale`."""
    return (whole.astype(np.float32) * scale.astype(np.float32)).astype(scale.dtype)


def rounded(x: np.ndarray, axis: int = -1, name: str = "") -> np.ndarray:
    """Return x f[...] rounded to values that 8 bits can hold, in groups along `axis`.

    axis: the one that products sum over. Where groups do not divide it, or x is a vector, x is returned unchanged.
    """
    if not fits(x.shape, axis):
        return x
    whole, scale = quantised(np.moveaxis(x, axis, -1), name)
    return np.moveaxis(dequantised(whole, np.repeat(scale, GROUP, axis=-1)), -1, axis).astype(x.dtype)


def fits(shape: tuple[int, ...], axis: int = -1) -> bool:
    """Return whether an array of this shape has more than one axis, and groups divide this one."""
    return len(shape) > 1 and shape[axis] % GROUP == 0


def split(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replace every matrix of floats, [O, I], by its integers and their scales."""
    found: dict[str, Any] = {}
    for name, x in tensors.items():
        if x.dtype.kind in "iub" or not fits(x.shape):
            found[name] = x
        else:
            found[name], found[name + SCALE] = quantised(x, name)
    return found
