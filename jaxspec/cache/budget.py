"""Device memory -> number of pages. Target and draft share page ids, so both get the same number."""

from __future__ import annotations

from typing import Any

from jaxspec.errors import UserError

CPU_CACHE_BYTES = 1 << 30  # host memory is shared with everything else: a fixed, modest pool


def num_pages(memory_bytes: int, target_page_bytes: int, draft_page_bytes: int = 0) -> int:
    """floor(M / (t + d)), bytes per device. Raises UserError where not one page fits."""
    pages = int(memory_bytes // (target_page_bytes + draft_page_bytes))
    if pages < 1:
        raise UserError(
            f"{memory_bytes / 1e6:.0f} MB are left for the cache, one page takes "
            f"{(target_page_bytes + draft_page_bytes) / 1e6:.1f} MB: raise memory_utilization or take a smaller model"
        )
    return pages


def free_memory(device: Any, utilization: float, temporary_bytes: int) -> int:
    """Bytes left for pages on this device, weights being loaded and temporary_bytes kept for the programs."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return CPU_CACHE_BYTES
    return int(stats["bytes_limit"] * utilization) - stats["bytes_in_use"] - temporary_bytes
