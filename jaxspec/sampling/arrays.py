"""Conversion of the host's lists to rectangular arrays for a device program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def padded(lists: Sequence[Any], rows: int, width: int, fill: int | float, dtype: Any = np.int32) -> Any:
    """Return one list per row as an array [rows, width]. Short lists and missing rows are padded with `fill`."""
    array = np.full((rows, width), fill, dtype)
    for row, values in enumerate(lists):
        array[row, : len(values)] = values
    return array


def filled(rows: int, values: Sequence[Any], dtype: type, fill: int | float = 0) -> Any:
    """Return one value per row as an array [rows]. Missing rows are padded with `fill`."""
    return np.array([*values, *[fill] * (rows - len(values))], dtype)
