"""Matrices of a GGUF file whose blocks stay as they are in memory: their integers, scales and offsets.

The blocks are described in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from checkpoints.tensor_file import Index
from jaxspec.options.quantization import Quantization

SUPER = 256  # number of inputs in a block of the kinds that end in _k
HALF = "<f2"


def block_of(*fields: tuple[str, str, tuple[int, ...]]) -> np.dtype:
    """Return the dtype of a block whose fields follow each other."""
    return np.dtype(list(fields))


LOW, D, DMIN, SCALES = ("low", "u1", (128,)), ("d", HALF, ()), ("dmin", HALF, ()), ("scales", "u1", (12,))
FIELDS: Mapping[str, np.dtype] = {
    "q8_0": block_of(D, ("low", "i1", (32,))),
    "q4_0": block_of(D, ("low", "u1", (16,))),
    "q4_1": block_of(D, ("m", HALF, ()), ("low", "u1", (16,))),
    "q4_k": block_of(D, DMIN, SCALES, LOW),
    "q5_k": block_of(D, DMIN, SCALES, ("high", "u1", (32,)), LOW),
    "q6_k": block_of(LOW, ("high", "u1", (64,)), ("scales", "i1", (16,)), D),
}


def nibbles(low: np.ndarray, size: int) -> Any:
    """Return integers [..., 2n] of bytes [..., n]: of each `size` bytes first the low nibbles, then the high ones."""
    pieces = low.reshape(*low.shape[:-1], -1, size)
    return np.stack([pieces & 15, pieces >> 4], axis=-2).reshape(*low.shape[:-1], -1)


def bits(high: np.ndarray, width: int, count: int) -> np.ndarray:
    """Return the integers [..., count, n] of `width` bits in bytes [..., n], from the lowest bits to the highest."""
    shifts = np.arange(0, width * count, width, dtype=np.uint8)[:, None]
    found: np.ndarray = (high[..., None, :] >> shifts) & np.uint8((1 << width) - 1)
    return found


def integers(kind: str, block: Any) -> Any:
    """Return the integers u8[..., inputs of a block] of blocks."""
    low = block["low"]
    if kind == "q8_0":
        unsigned: np.ndarray = low.view(np.uint8) ^ np.uint8(128)
        return unsigned
    if kind in ("q4_0", "q4_1"):
        return nibbles(low, 16)
    if kind == "q4_k":
        return nibbles(low, 32)
    start = low.shape[:-1]
    if kind == "q5_k":
        return nibbles(low, 32) | bits(block["high"], 1, 8).reshape(*start, SUPER) << np.uint8(4)
    # Each half of a block has 64 bytes of low bits and 32 of high ones.
    high = bits(block["high"].reshape(*start, 2, 32), 2, 4).reshape(*start, SUPER)
    return nibbles(low, 64) | high << np.uint8(4)


def six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the eight scales and eight minima u8[..., 8] that 12 bytes hold in 6 bits each."""
    first, second, third = np.split(packed, 3, axis=-1)
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    return scales, minima


FACTORS: Mapping[tuple[str, str, int], Callable[[np.ndarray], np.ndarray]] = {
    **{(kind, "scale", 0): lambda block: block["d"] for kind in FIELDS},
    ("q4_1", "offset", 0): lambda block: block["m"],
    **{(kind, "offset", 0): lambda block: -block["dmin"] for kind in ("q4_k", "q5_k")},
    **{(kind, "scale", 1): lambda block: six_bits(block["scales"])[0] for kind in ("q4_k", "q5_k")},
    **{(kind, "offset", 1): lambda block: six_bits(block["scales"])[1] for kind in ("q4_k", "q5_k")},
    ("q6_k", "scale", 1): lambda block: block["scales"],
}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A matrix [O, I] in a GGUF file, in blocks of one of the kinds of FIELDS.

    stored: the file's bytes u8[O, bytes of a row].
    """

    kind: str
    stored: np.ndarray
    order: None = None

    @property
    def form(self) -> Quantization:
        return form(self.kind)

    def blocks(self, rows: slice) -> np.ndarray:
        """Return the blocks of some rows, [rows, blocks], copied because the file may change."""
        return np.array(self.stored[rows]).view(FIELDS[self.kind])

    def integers(self, index: Index) -> np.ndarray:
        """Read a slice of the integers u8, which begins and ends anywhere."""
        rows, columns = index
        block = self.blocks(rows)
        found: np.ndarray = integers(self.kind, block).reshape(len(block), -1)[:, columns]
        return found

    def factor(self, field: str, i: int, index: Index) -> np.ndarray:
        """Return a slice [O, N] of a factor of the scale or offset. field: "scale" or "offset"; i: its number."""
        rows, columns = index
        block = self.blocks(rows)
        return FACTORS[self.kind, field, i](block).reshape(len(block), -1)[:, columns]


def form(kind: str) -> Quantization:
    """Return the form of matrices in blocks of a kind."""
    return Quantization(kind, SUPER if kind.endswith("_k") else 32, 1)
