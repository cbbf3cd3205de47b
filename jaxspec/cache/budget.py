"""The number of pages that fit into device memory.

The caches of target, draft and features have equally many pages. Layers of the target with a sliding window may have
fewer, in a pool of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.cache.layer import UNLIMITED
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


class Windows(NamedTuple):
    """The pages of the target's layers with a sliding window.

    page_bytes: bytes of one page in all these layers.
    needed: number of pages with which no row ever lacks one (`jaxspec.cache.windows.needed`).
    most: largest number of pages that kernels can index.
    """

    page_bytes: int
    needed: int
    most: int = UNLIMITED


class Demand(NamedTuple):
    """The sizes that determine how many pages an engine makes.

    page_bytes: as in `num_pages`.
    used: largest number of pages that rows can use.
    windows: pages of layers with a window; None if these have no pool of their own.
    most: largest number of pages that kernels can index, in all layers that are not in `windows`.
    """

    page_bytes: Sequence[int]
    used: int
    windows: Windows | None = None
    most: int = UNLIMITED

    @property
    def most_alike(self) -> int:
        """The largest number of pages that kernels can index if all layers have equally many."""
        return min(self.most, self.windows.most) if self.windows else self.most


def pools(memory_bytes: int, demand: Demand) -> tuple[int, int | None]:
    """Return the numbers of pages that fit into memory_bytes of a device: of all pages, and of window pages.

    The latter is None if layers with a window have no pool of their own. They have one if two conditions hold: one pool
    could not hold all pages that rows can use, and their own pool has fewer pages. Memory that the other layers cannot
    use goes to the pool of layers with a window.

    Raises: UserError if not even one page fits.
    """
    windows = demand.windows
    alike = min(num_pages(memory_bytes, *demand.page_bytes), demand.most_alike)
    if windows is None or windows.needed >= alike or alike >= demand.used:
        return alike, None
    others = sum(demand.page_bytes) - windows.page_bytes  # 0 if all layers have a window
    free = memory_bytes - windows.needed * windows.page_bytes
    pages = min(free // others if others else demand.used, demand.used, demand.most)
    in_windows = min(pages, windows.most, (memory_bytes - pages * others) // windows.page_bytes)
    return pages, in_windows if in_windows < pages else None


def given(pages: int, demand: Demand) -> tuple[int, int | None]:
    """Return the numbers of pages as `pools` does, of a given number of all pages.

    Raises: UserError if kernels cannot index so many.
    """
    windows = demand.windows
    in_windows = windows.needed if windows and windows.needed < min(pages, windows.most) else None
    most = demand.most_alike if in_windows is None else demand.most
    if pages > most:
        raise UserError(f"num_pages={pages}, but GPU kernels index at most {most} pages in 8 bits: lower it")
    return pages, in_windows


def least_of_all(memory_bytes: int) -> int:
    """Return the minimum of the bytes that the job's processes pass, because their caches must be equally large."""
    if jax.process_count() == 1:
        return memory_bytes
    return int(multihost_utils.process_allgather(np.int32(memory_bytes >> 10)).min()) << 10


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
