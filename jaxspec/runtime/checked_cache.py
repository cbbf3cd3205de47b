"""JAX's compilation cache with entries that are checked before JAX reads them: a damaged one is dropped, and so is one
that another user can have written."""

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
SEAL = hashlib.sha256().digest_size  # bytes behind an entry


class CheckedCache(LRUCache):
    """A cache whose entries end with their digest."""

    def entry(self, key: str) -> Path:
        return Path(self._path) / f"{key}-cache"

    def get(self, key: str) -> bytes | None:
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
            super().get(key)  # records when it was last used
        return value

    def put(self, key: str, value: bytes) -> None:
        try:
            super().put(key, value + hashlib.sha256(value).digest())
            self.entry(key).chmod(0o600)
        except OSError as error:
            self.drop(key)
            logger.info("a compiled program is not kept: %s", error)

    def drop(self, key: str) -> None:
        with contextlib.suppress(OSError):
            self.entry(key).unlink()


def check_entries(folder: Path) -> None:
    """Have JAX use a CheckedCache for this folder."""

    def made(path: str, **options: Any) -> LRUCache:
        return (CheckedCache if path == str(folder) else LRUCache)(path, **options)

    compilation_cache.LRUCache = made  # type: ignore[assignment, misc]
