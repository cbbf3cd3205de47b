"""Packing of a pytree of small arrays into one array of 32-bit words.

A run of a device program then needs one transfer to the device and one back, for any number of arguments and results.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed pytree.

    words: i32[_], elements of all leaves, one leaf after the other; a numpy array on the host, traced in a program.
    structure: structure of the tree, as `jax.tree.structure` returns it.
    leaves: shape and dtype of each leaf.
    """

    words: Any
    structure: Any = dataclasses.field(metadata={"static": True})
    leaves: tuple[tuple[tuple[int, ...], str], ...] = dataclasses.field(metadata={"static": True})

    def unpack(self) -> Any:
        """Return the pytree. On the host its leaves, other than those of bool, are views of the packed words."""
        leaves = []
        start = 0
        for shape, dtype in self.leaves:
            end = start + math.prod(shape)
            leaves.append(from_words(self.words[start:end], shape, dtype))
            start = end
        return jax.tree.unflatten(self.structure, leaves)


def pack(tree: Any) -> Packed:
    """Pack a pytree of arrays of i32, u32, f32 or bool.

    Raises:
      TypeError: an array is not of bool, and its elements do not have 32 bits.
    """
    leaves, structure = jax.tree.flatten(tree)
    traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    leaves = [x if traced else np.asarray(x) for x in leaves]
    words = [to_words(x).reshape(-1) for x in leaves]
    join: Any = jnp.concatenate if traced else np.concatenate
    empty = np.zeros(0, np.int32)  # some programs return no arrays
    return Packed(join(words) if words else empty, structure, tuple((x.shape, x.dtype.name) for x in leaves))


def to_words(x: Any) -> Any:
    """Return an array of bool or of a 32-bit type as i32 words, in the array's shape."""
    if x.dtype == bool:
        return x.astype(np.int32)
    if x.dtype.itemsize != 4:
        raise TypeError(f"{x.dtype} cannot be packed: only bool and types of 32 bits can")
    return x.view(np.int32) if isinstance(x, np.ndarray) else lax.bitcast_convert_type(x, jnp.int32)


def from_words(words: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Return the array of this shape and dtype that `to_words` made into these words."""
    words = words.reshape(shape)
    if dtype == "bool":
        return words != 0
    return words.view(dtype) if isinstance(words, np.ndarray) else lax.bitcast_convert_type(words, jnp.dtype(dtype))
