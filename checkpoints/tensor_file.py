"""The interface through which weights are read from a file, or folder of files, of any format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from jaxspec.options.quantization import Quantization

Index = tuple[slice, ...]
# For each prefix of the text decoder's names in a multimodal checkpoint, the prefix in a checkpoint of text only.
# Gemma 4 has the first, Mistral 3 the others.
IN_MULTIMODAL = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head": "lm_head",
}


def text_decoder_name(name: str) -> str:
    """Return the name in a checkpoint of text only for a name, or pattern of names, in a multimodal checkpoint."""
    for prefix, own in IN_MULTIMODAL.items():
        name = name.replace(prefix, own, 1)
    return name


def text_decoder_names(tensors: Iterable[str]) -> dict[str, str]:
    """Return the name in the files of each tensor to read, by its name in a checkpoint of text only.

    Of a multimodal checkpoint, only the tensors of the text decoder are read.

    tensors: names of all tensors in the files.
    """
    names = list(tensors)
    if not any(name.startswith(tuple(IN_MULTIMODAL)) for name in names):
        return {name: name for name in names}
    return {text_decoder_name(name): name for name in names if name.startswith((*IN_MULTIMODAL, "lm_head."))}


class EightBitTensor(Protocol):
    """A tensor of 8-bit values with scales, whose blocks `form` gives.

    values(index) reads a slice of the values. scales(index, columns) returns the scale f32[...] of each row and each
    group of `columns` columns of the slice.
    """

    @property
    def form(self) -> Quantization: ...

    def values(self, index: Index) -> np.ndarray: ...

    def scales(self, index: Index, columns: int = 1) -> np.ndarray: ...


class GroupedTensor(Protocol):
    """A matrix of integers of few bits in groups, which stay in memory as they are.

    integers(index) reads a slice of the integers u8, with the inputs in the order of their groups.
    factor(field, i, index) reads a slice of an array of groups, [O, N]: factor i of "scale" or "offset", or "zeros".
    order: i32[I], the input of each column; None for the inputs' own order.
    """

    @property
    def form(self) -> Quantization: ...

    @property
    def order(self) -> np.ndarray | None: ...

    def integers(self, index: Index) -> np.ndarray: ...

    def factor(self, field: str, i: int, index: Index) -> np.ndarray: ...


class TensorFile(Protocol):
    """A file, or folder of files, that holds named tensors.

    shapes() returns the shape of every tensor, by name, without reading tensors. read(name, index) reads a slice of one
    tensor, dequantised. eight_bits(name) returns a tensor that stays in 8 bits in memory, None for any other tensor.
    grouped(name) returns a tensor that stays in groups of integers of few bits.
    """

    where: str  # path of the file or folder, for messages

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, index: Index) -> np.ndarray: ...

    def eight_bits(self, name: str) -> EightBitTensor | None: ...

    def grouped(self, name: str) -> GroupedTensor | None: ...
