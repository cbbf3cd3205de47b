"""JAX's compilation cache, with a check of each entry before JAX reads it.

An entry is dropped if it is damaged, or if another user could have written it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from pathlib import Path
from typing import Any

from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache

from jaxspec.common.trust import trusted

logger = logging.getLogger(__name__)
SEAL = hashlib.sha256().digest_size  # bytes of the digest at an entry's end


class CheckedCache(LRUCache):
    """A cache whose entries end with their SHA-256 digest."""

    def entry(self, key: str) -> Path:
        """Return the path of an entry."""
        return Path(self._path) / f"{key}-cache"

    def get(self, key: str) -> bytes | None:
        """Return an entry without its digest; None if there is none. Drop an entry that fails the check."""
        try:
            with trusted(self.entry(key)) as file:
                sealed = file.read()
        except FileNotFoundError:
            return None
        except OSError:
            sealed = b""
        value, seal = sealed[:-SEAL], sealed[-SEAL:]
        if hashlib.sha256(value).digest() != seal:
            self.drop(key)
            return None
        if self.eviction_enabled:
            super().get(key)  # records the time of use, for eviction
        return value

    def put(self, key: str, value: bytes) -> None:
        """Write an entry with its digest, readable by this user only. Drop the entry if that fails."""
        try:
            super().put(key, value + hashlib.sha256(value).digest())
            self.entry(key).chmod(0o600)
        except OSError as error:
            self.drop(key)
            logger.info("a compiled program is not cached: %s", error)

    def drop(self, key: str) -> None:
        """Remove an entry if possible."""
        with contextlib.suppress(OSError):
            self.entry(key).unlink()


def check_entries(folder: Path) -> None:
    """Make JAX use a `CheckedCache` for this folder."""

    def open_cache(path: str, **options: Any) -> LRUCache:
        if path == str(folder):
            return CheckedCache(path, **options)
        return LRUCache(path, **options)

    private: Any = compilation_cache  # JAX has no setting for this
    private.LRUCache = open_cache
