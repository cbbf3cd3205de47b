"""A file of named tensors, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

Index = tuple[slice, ...]


class TensorFile(Protocol):
    """What a format offers: names and shapes at no cost, and slices of one tensor."""

    where: str  # for messages

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, index: Index) -> np.ndarray: ...
