"""Checks of redundant tensors in a checkpoint.

Such a tensor is not loaded. It is compared in full with the tensor, or the computed values, that are used instead.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from checkpoints.names import Table
from checkpoints.tensor_file import TensorFile
from jaxspec.common.errors import UnsupportedError
from jaxspec.models.config import ModelConfig
from jaxspec.models.rope import Rope

PIECE = 1 << 26  # largest size, in bytes as float32, of the rows of a tensor that are compared at a time


@jax.jit
def same(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return whether two arrays are equal after the values of one are rounded to the other's dtype."""

    def bits(x: jax.Array) -> jax.Array:
        # Bits are compared, because the compiler may skip the rounding in a comparison of floats.
        return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    return jnp.all((bits(x.astype(y.dtype)) == bits(y)) | (bits(y.astype(x.dtype)) == bits(x)))


def check_repeats(table: Table, file: TensorFile) -> None:
    """Check that each redundant tensor of `table.repeats` equals the tensor that is read instead.

    Raises: UnsupportedError where the two differ, because versions of transformers disagree about which one they use.
    """
    for name, read in table.repeats.items():
        if name in file.shapes() and not repeats(file, name, read):
            raise UnsupportedError(
                f"{file.where}: {table.tied_by} is true, but tensor {name} differs from {read}: set it to false in "
                f"config.json to use {name}, or remove that tensor"
            )


def repeats(file: TensorFile, name: str, read: str) -> bool:
    """Return whether two tensors of a file hold the same floats. The tensors are compared some rows at a time."""
    shape = file.shapes()[name]
    if shape != file.shapes().get(read):
        return False
    rows = max(1, PIECE * shape[0] // max(4 * int(np.prod(shape)), 1))
    rest = tuple(slice(0, size) for size in shape[1:])
    pieces = ((slice(at, min(at + rows, shape[0])), *rest) for at in range(0, shape[0], rows))
    pairs = ((file.read(name, piece), file.read(read, piece)) for piece in pieces)
    return all(x.dtype.kind not in "iub" and y.dtype.kind not in "iub" and same(x, y) for x, y in pairs)


def check_frequencies(config: ModelConfig, table: Table, file: TensorFile) -> None:
    """Check the rotary-embedding frequencies that a file stores against those that follow from the configuration.

    Raises: UnsupportedError where the two differ.
    """
    known = []
    for rope in (config.rope, config.local_rope):
        if rope:
            known += frequencies(rope, config.head_dim)
    for name in file.shapes():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in table.frequencies):
            continue
        fits = file.shapes()[name] == known[0].shape
        x = file.read(name, (slice(0, len(known[0])),)) if fits else np.zeros(0)
        rtol = 1e-5 if x.dtype.itemsize > 2 else 1e-2
        atol = 1e-7  # absolute tolerance, just above the smallest positive float16 number
        near = (np.allclose(x.astype(np.float64), wanted, rtol, atol=atol) for wanted in known)
        if not (fits and any(near)):
            raise UnsupportedError(
                f"{file.where}: tensor {name} holds other rotary frequencies than rope_theta gives: correct rope_theta "
                "in config.json to use them, or remove the tensor"
            )


def frequencies(rope: Rope, head_dim: int) -> list[Any]:
    """Return one or two frequency arrays, either of which a file may store for a rotary embedding.

    The first array ignores the embedding's scaling factors. If there are such factors, a second array uses them.
    """
    plain = Rope(rope.theta).frequencies(head_dim)
    return [plain, rope.frequencies(head_dim)] if rope != Rope(rope.theta) else [plain]
