"""Tensors of 8-bit values with scales in a safetensors file: how they are found, and how parts of them are read.

A matrix NAME.weight [O, I] is stored under these names:

NAME.weight         values, int8 or float8_e4m3fn
NAME.weight_packed  in place of it, int8 values plus 128, four in an int32, with the shape [O, I] in NAME.weight_shape
NAME.weight_scale   scales: one, or [O] or [O, 1], or one for each block; with quant_method fp8 NAME.weight_scale_inv
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.published import E4M3, Published
from checkpoints.reading import naming_file
from checkpoints.tensor_file import Index
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.limits import short
from jaxspec.options.quantization import Quantization, form_name

SCALES = ("_scale_inv", "_scale")  # suffixes that turn the name of a tensor of values into that of its scales
PACKED, SHAPE, ZEROS, ORDER = "_packed", "_shape", "_zero_point", "_g_idx"
DTYPES = {"I8": "int8", "F8_E4M3": E4M3}  # numpy's names of 8-bit dtypes, by the notation of safetensors
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # the same for dtypes of floating point
# Endings of tensors for activations and caches in 8 bits, which jaxspec keeps in the dtype of activations.
SKIPPED = (
    *(".input_scale", ".activation_scale", ".input_zero_point", ".output_scale", ".output_zero_point"),
    *(".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point"),
)
At = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class EightBits:
    """A tensor [..., I] of 8-bit values with scales in a file.

    where: path of the file, for messages.
    at: function that returns the slice object of a tensor of the file, by the tensor's name.
    shape: shape of the tensor.
    form: form of its values, whose blocks are those of the file.
    stored, scale: names of the file's tensors with the values and with the scales.
    dtype: dtype of the dequantised tensor, in the notation of safetensors.
    stays: whether a matrix of this tensor stays in 8 bits in memory.
    """

    where: str
    at: At
    shape: tuple[int, ...]
    form: Quantization
    stored: str
    scale: str
    dtype: str = "F32"
    stays: bool = True

    @property
    def blocks(self) -> tuple[int, ...]:
        """The size along each axis of the blocks that share a scale."""
        *_, rows, columns = (1, *self.shape)
        last = (self.form.outputs or rows, self.form.inputs or columns)
        return (*(1 for _ in self.shape[:-2]), *last[-min(2, len(self.shape)) :])

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of blocks along each axis."""
        return tuple(-(-size // block) for size, block in zip(self.shape, self.blocks, strict=True))

    def fits(self, scales: tuple[int, ...]) -> bool:
        """Return whether a tensor of scales has the shape of the blocks. Axes of size 1 may be missing."""
        return scales == self.grid or (
            math.prod(scales) == math.prod(self.grid) and scales in (self.grid[:-1], (1,), ())
        )

    def values(self, index: Index) -> np.ndarray:
        """Read the slice `index` of the 8-bit values."""
        with naming_file(self.where):
            if not self.stored.endswith(PACKED):
                result: np.ndarray = self.at(self.stored)[index]
                return result
            first, last, _ = index[-1].indices(self.shape[-1])
            words = self.at(self.stored)[(*index[:-1], slice(first // 4, -(-last // 4)))]
            offset = np.ascontiguousarray(words, "<i4").view(np.uint8) ^ np.uint8(128)  # packed values have 128 added
            return offset.view(np.int8)[..., first % 4 :][..., : last - first]

    def scales(self, index: Index, columns: int = 1) -> np.ndarray:
        """Return the scale f32[...] of each element in the slice `index`.

        columns: distance between the elements of a row whose scales are returned. It is a divisor of the blocks' size.
        Raises: UserError for scales that are not positive and finite.
        """
        with naming_file(self.where):
            scale = self.at(self.scale)[...].astype(np.float32).reshape(self.grid)
        right = np.isfinite(scale) & (scale > 0)
        if not right.all():
            raise UserError(
                f"{self.where}: tensor {self.scale} holds {scale[~right].flat[0]}, scales must be positive and finite: "
                "fetch it again"
            )
        steps = (*(1 for _ in index[1:]), columns)
        ranges = (range(*s.indices(size)[:2], step) for s, size, step in zip(index, self.shape, steps, strict=True))
        picks = (np.asarray(r, int) // block for r, block in zip(ranges, self.blocks, strict=True))
        result: np.ndarray = scale[np.ix_(*picks)]
        return result

    def read(self, index: Index) -> np.ndarray:
        """Read the slice `index`, dequantised. Raises as `scales` does."""
        x = self.values(index).astype(np.float32) * self.scales(index)
        result: np.ndarray = x.astype(jnp.dtype(FLOATS[self.dtype]))
        return result


def find(
    where: str, shapes: Mapping[str, tuple[int, ...]], published: Published, at: At
) -> Iterator[tuple[str, EightBits]]:
    """Yield the quantised tensors of a published checkpoint, with their names.

    where, at: as in `EightBits`.
    shapes: shapes of all tensors of the file.
    Raises: UserError for scales that are missing, have a wrong shape or belong to no 8-bit values; UnsupportedError for
      a dtype that is not read, for zero points, and for reordered inputs.
    """

    def dtype(name: str) -> str:
        result: str = at(name).get_dtype()
        return result

    for stored, shape in shapes.items():
        scaled = next((stored.removesuffix(suffix) for suffix in SCALES if stored.endswith(suffix)), "")
        if scaled in shapes and dtype(scaled) in FLOATS:
            raise UserError(
                f"{where}: tensor {stored} holds scales of {scaled}, which is stored as {dtype(scaled)}: fetch it again"
            )
        name, kind = stored.removesuffix(PACKED), DTYPES.get(dtype(stored))
        if stored.endswith(PACKED):
            kind, shape = "int8", unpacked_shape(where, stored, shapes, at)
        if kind is None and dtype(stored).startswith("F8_") and scaled not in shapes:
            raise UnsupportedError(
                f"{where}: tensor {stored} is stored as {dtype(stored)}, of 8-bit floats only F8_E4M3 is read: take a "
                "checkpoint in e4m3"
            )
        if kind is None or not name.endswith("weight"):
            continue
        scale = next((name + suffix for suffix in SCALES if name + suffix in shapes), None)
        if scale is None:
            raise UserError(f"{where}: tensor {stored} has 8-bit values, but no {name}{SCALES[1]}: fetch it again")
        if dtype(scale) not in FLOATS:
            raise UnsupportedError(f"{where}: tensor {scale} is stored as {dtype(scale)}: {', '.join(FLOATS)} are read")
        if name + ORDER in shapes:
            raise UnsupportedError(f"{where}: tensor {name + ORDER} reorders inputs: take one without actorder")
        if name + ZEROS in shapes and np.any(at(name + ZEROS)[...] != 0):
            raise UnsupportedError(f"{where}: tensor {name + ZEROS} is not 0: take a checkpoint of symmetric weights")
        known = [EightBits(where, at, shape, form, stored, scale) for form in candidates(published, kind, name)]
        if not known:
            raise UserError(
                f"{where}: tensor {stored} is stored as {kind}, but config.json has {published.name}: fetch it again"
            )
        found = next((each for each in known if each.fits(shapes[scale])), None)
        if found is None:
            expected = " or ".join(f"{each.grid} for {form_name(each.form)}" for each in known)
            raise UserError(
                f"{where}: tensor {scale} has shape {shapes[scale]}, expected {expected} ({name} has shape {shape}): "
                "fetch it again"
            )
        yield name, found


def candidates(published: Published, dtype: str, name: str) -> list[Quantization]:
    """Return the forms that a tensor of this dtype may have, the one that config.json gives it first."""
    own = published.form(name.removesuffix(".weight"))
    return list(dict.fromkeys(form for form in (own, *published.known) if form and form.dtype == dtype))


def unpacked_shape(where: str, packed: str, shapes: Mapping[str, tuple[int, ...]], at: At) -> tuple[int, ...]:
    """Return the shape of a packed tensor. Raises: UserError where the tensor with the shape is missing or wrong."""
    name = packed.removesuffix(PACKED) + SHAPE
    shape = tuple(at(name)[...].ravel().tolist()) if name in shapes else ()
    rows, words = shapes[packed] if len(shapes[packed]) == 2 else (0, 0)
    if len(shape) != 2 or shape[0] != rows or -(-shape[1] // 4) != words:
        raise UserError(
            f"{where}: tensor {packed} has shape {shapes[packed]}, which does not fit {name}={short(shape)}: only "
            "8-bit values packed by four are read; fetch it again"
        )
    return shape


def beside(name: str) -> set[str]:
    """Return the names of the tensors that belong to the quantised tensor `name`, in the file or not."""
    return {name + suffix for suffix in (*SCALES, PACKED, SHAPE, ZEROS, ORDER)}


@dataclasses.dataclass(frozen=True)
class Float8Slice:
    """A tensor of float8_e4m3fn in a safetensors file, with the methods of a slice object of the safetensors library.

    That library returns no such values as numpy arrays.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F8_E4M3"

    def __getitem__(self, index: Any) -> np.ndarray:
        if 0 in self.shape:
            nothing: np.ndarray = np.zeros(self.shape, jnp.dtype(E4M3))[index]
            return nothing
        stored: np.ndarray = np.memmap(self.path, jnp.dtype(E4M3), "r", self.offset, self.shape)
        return np.array(stored[index])  # a copy, because the file may change


def float8_slices(path: Path) -> dict[str, Float8Slice]:
    """Return the tensors of float8_e4m3fn in a safetensors file that the safetensors library has opened, by name."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        name: Float8Slice(path, 8 + size + entry["data_offsets"][0], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] == "F8_E4M3"
    }
