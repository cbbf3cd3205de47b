"""A compilation cache for JAX that checks each entry (a compiled program in a file) before JAX reads it.

An entry is dropped if it is damaged, or if another user of the machine could have written it.
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
SEAL = hashlib.sha256().digest_size  # number of bytes of the SHA-256 digest at an entry's end


class CheckedCache(LRUCache):
    """A compilation cache whose entries end with their SHA-256 digest."""

    def entry(self, key: str) -> Path:
        """Return the path of an entry's file."""
        return Path(self._path) / f"{key}-cache"

    def get(self, key: str) -> bytes | None:
        """Return an entry without its digest; None if there is no entry. Drop an entry that fails the check."""
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
        """Write an entry with its digest, readable by this user only. Drop the entry if writing fails."""
        try:
            super().put(key, value + hashlib.sha256(value).digest())
            self.entry(key).chmod(0o600)
        except OSError as error:
            self.drop(key)
            logger.info("a compiled program is not cached: %s", error)

    def drop(self, key: str) -> None:
        """Remove an entry's file, if possible."""
        with contextlib.suppress(OSError):
            self.entry(key).unlink()


def check_entries(folder: Path) -> None:
    """Make JAX check each entry of the compilation cache in this folder with `CheckedCache`."""

    def open_cache(path: str, **options: Any) -> LRUCache:
        if path == str(folder):
            return CheckedCache(path, **options)
        return LRUCache(path, **options)

    private: Any = compilation_cache  # JAX has no public setting for the class of its cache
    private.LRUCache = open_cache
