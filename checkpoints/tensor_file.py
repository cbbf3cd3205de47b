"""The interface through which weights are read from a file of any format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

Index = tuple[slice, ...]


class TensorFile(Protocol):
    """A file of named tensors: their shapes, known without reading them, and slices of one tensor."""

    where: str  # the path, for messages

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, index: Index) -> np.ndarray: ...
