"""Device memory -> number of pages. Target, draft and features share page ids, so all get the same number."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.common.errors import UserError
from jaxspec.hardware.platforms import PLATFORMS, facts


def num_pages(memory_bytes: int, *page_bytes: int) -> int:
    """Pages that memory_bytes of a device hold, page_bytes being one's of each kind. Raises UserError where not one
    fits."""
    pages = int(memory_bytes // sum(page_bytes))
    if pages < 1:
        raise UserError(
            f"{memory_bytes / 1e6:.0f} MB are left for the cache, one page takes "
            f"{sum(page_bytes) / 1e6:.1f} MB: raise memory_utilization or take a smaller model"
        )
    return pages


def least_of_all(number: int) -> int:
    """Of what all processes give here; their caches have to be one."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.int32(number)).min())


def memory(device: Any) -> dict[str, int] | None:
    """bytes_limit and bytes_in_use, where the device has memory of its own and says how much."""
    stats = None if facts(device.platform).cache_bytes else device.memory_stats()
    return stats if stats and "bytes_limit" in stats else None


def free_memory(device: Any, utilization: float, temporary_bytes: int) -> int:
    """Bytes left for pages on this device, weights being loaded and temporary_bytes kept for the programs."""
    stats = memory(device)
    if stats is None:
        return facts(device.platform).cache_bytes or PLATFORMS["cpu"].cache_bytes or 0
    return int(stats["bytes_limit"] * utilization) - stats["bytes_in_use"] - temporary_bytes
