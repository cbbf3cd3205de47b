"""The interface through which weights are read from a file of any format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

Index = tuple[slice, ...]


class TensorFile(Protocol):
    """A file of named tensors, which gives all shapes without reading the tensors, and reads slices of one tensor."""

    where: str  # path of the file, for messages

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, index: Index) -> np.ndarray: ...
