"""The interface through which weights are read from a file, or folder of files, of any format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

Index = tuple[slice, ...]


class TensorFile(Protocol):
    """A file, or folder of files, that holds named tensors.

    shapes() returns the shape of every tensor, by name, without reading tensors. read(name, index) reads a slice of one
    tensor.
    """

    where: str  # path of the file or folder, for messages

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, index: Index) -> np.ndarray: ...
