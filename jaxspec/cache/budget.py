"""The number of pages that fit into device memory. The caches of target, draft and features have equally many pages."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.common.errors import UserError
from jaxspec.hardware.platforms import PLATFORMS, facts


def num_pages(memory_bytes: int, *page_bytes: int) -> int:
    """Return the number of pages that fit into memory_bytes of a device.

    page_bytes: bytes of one page in each cache (target, draft, features).

    Raises: UserError if not even one page fits.
    """
    pages = int(memory_bytes // sum(page_bytes))
    if pages < 1:
        raise UserError(
            f"{memory_bytes / 1e6:.0f} MB are left for the cache, but one page takes "
            f"{sum(page_bytes) / 1e6:.1f} MB: raise memory_utilization or take a smaller model"
        )
    return pages


def least_of_all(number: int) -> int:
    """Return the minimum of the numbers that the job's processes pass, because their caches must be equally large."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.int32(number)).min())


def memory(device: Any) -> dict[str, int] | None:
    """Return the device's memory statistics (bytes_limit, bytes_in_use); None for a CPU, or if it reports none."""
    stats = None if facts(device.platform).cache_bytes else device.memory_stats()
    return stats if stats and "bytes_limit" in stats else None


def free_memory(device: Any, utilization: float, temporary_bytes: int) -> int:
    """Return the bytes left for pages on this device. Call this when its weights are loaded.

    For a device without memory statistics, such as a CPU, the result is a fixed size.

    utilization: share of the device's whole memory that weights, pages and temporary arrays may take.
    temporary_bytes: bytes reserved for temporary arrays of programs.
    """
    stats = memory(device)
    if stats is None:
        return facts(device.platform).cache_bytes or PLATFORMS["cpu"].cache_bytes or 0
    return int(stats["bytes_limit"] * utilization) - stats["bytes_in_use"] - temporary_bytes
