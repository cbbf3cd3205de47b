"""A pytree of small arrays as one array of words: a launch then costs one transfer in and one back, however many arrays
it takes and gives."""

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

    words i32[_]: all leaves, one after the other; numpy on the host, traced within a program.
    structure: jax's, of the tree.
    leaves: shape and dtype of each.
    """

    words: Any
    structure: Any = dataclasses.field(metadata={"static": True})
    leaves: tuple[tuple[tuple[int, ...], str], ...] = dataclasses.field(metadata={"static": True})

    def unpack(self) -> Any:
        """The pytree again; on the host its leaves are views of the words."""
        ends = np.cumsum([math.prod(shape) for shape, _ in self.leaves]).tolist()
        parts = zip([0, *ends], ends, self.leaves, strict=False)
        leaves = [from_words(self.words[start:end], *leaf) for start, end, leaf in parts]
        return jax.tree.unflatten(self.structure, leaves)


def pack(tree: Any) -> Packed:
    """Leaves may be i32, u32, f32 or bool; raises TypeError for another, whose words would have another size."""
    leaves, structure = jax.tree.flatten(tree)
    traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    leaves = [x if traced else np.asarray(x) for x in leaves]
    words = [to_words(x).reshape(-1) for x in leaves]
    join: Any = jnp.concatenate if traced else np.concatenate
    empty = np.zeros(0, np.int32)  # some programs give nothing back
    return Packed(join(words) if words else empty, structure, tuple((x.shape, x.dtype.name) for x in leaves))


def to_words(x: Any) -> Any:
    if x.dtype == bool:
        return x.astype(np.int32)
    if x.dtype.itemsize != 4:
        raise TypeError(f"{x.dtype} cannot be packed: only bool and types of 32 bits can")
    return x.view(np.int32) if isinstance(x, np.ndarray) else lax.bitcast_convert_type(x, jnp.int32)


def from_words(words: Any, shape: tuple[int, ...], dtype: str) -> Any:
    words = words.reshape(shape)
    if dtype == "bool":
        return words != 0
    return words.view(dtype) if isinstance(words, np.ndarray) else lax.bitcast_convert_type(words, jnp.dtype(dtype))
