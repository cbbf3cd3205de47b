"""Weights of 8 bits: integers, and a power of two for every 32 of a row. bfloat16 holds their products, so that whoever
reads them has the very numbers that were written.

In safetensors both stand as the compressed-tensors library has them (`NAME` and `NAME_scale`); orbax folders hold the
products, which its compression makes nearly as small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.common.errors import UserError

GROUP = 32
LARGEST = 127
SCALE = "_scale"  # after a tensor's name


def narrowed(x: np.ndarray, name: str = "") -> tuple[np.ndarray, np.ndarray]:
    """x f[..., I] -> (i8[..., I], bf16[..., I / GROUP]): the nearest multiples of the smallest powers of two of which
    127 reach a group's largest number. Raises UserError, with the tensor's name, for numbers that are not finite."""
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(axis=-1)
    if not np.isfinite(largest).all():
        raise UserError(f"tensor {name} holds numbers that are not finite: 8 bits have none for them")
    mantissa, exponent = np.frexp(largest / np.float32(LARGEST))
    exponent = np.maximum(exponent - (mantissa == 0.5), -126)  # the least that is not rounded to nothing somewhere
    scale = np.ldexp(np.float32(1), exponent)
    whole = np.rint(groups / scale[..., None]).astype(np.int8)
    return whole.reshape(x.shape), scale.astype(jnp.bfloat16)


def widened(whole: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What `narrowed` was given, rounded: whole i8[..., I], scale f[..., I] -> of scale's dtype."""
    return (whole.astype(np.float32) * scale.astype(np.float32)).astype(scale.dtype)


def rounded(x: np.ndarray, axis: int = -1, name: str = "") -> np.ndarray:
    """x f[...], its groups along an axis of products, rounded to what 8 bits hold; as it is where they do not divide
    it."""
    if not fits(x.shape, axis):
        return x
    whole, scale = narrowed(np.moveaxis(x, axis, -1), name)
    return np.moveaxis(widened(whole, np.repeat(scale, GROUP, axis=-1)), -1, axis).astype(x.dtype)


def fits(shape: tuple[int, ...], axis: int = -1) -> bool:
    return len(shape) > 1 and shape[axis] % GROUP == 0


def split(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every matrix of floats, [O, I], as its integers and what they count."""
    found: dict[str, Any] = {}
    for name, x in tensors.items():
        if x.dtype.kind in "iub" or not fits(x.shape):
            found[name] = x
        else:
            found[name], found[name + SCALE] = narrowed(x, name)
    return found
