"""Lists of the host as the rectangular arrays of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def padded(lists: Sequence[Any], rows: int, width: int, fill: int | float, dtype: Any = np.int32) -> Any:
    """Return lists as an array [rows, width], filled up."""
    array = np.full((rows, width), fill, dtype)
    for row, values in enumerate(lists):
        array[row, : len(values)] = values
    return array


def filled(rows: int, values: Sequence, dtype: type, fill: int | float = 0) -> Any:
    """Return values as an array [rows], filled up."""
    return np.array([*values, *[fill] * (rows - len(values))], dtype)
