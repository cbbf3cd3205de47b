"""Compiled programs on disk: what is damaged there, or another user can have written, is dropped without a warning of
JAX's, and compiled anew."""

from __future__ import annotations

import errno
import sys
import warnings

import jax
import pytest
from jax._src import compilation_cache, lru_cache, monitoring

from jaxspec.common import trust
from jaxspec.runtime.checked_cache import CheckedCache
from jaxspec.runtime.compilation_cache import enable_compilation_cache
from tests.support.sizes import cases

OPTIONS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """JAX's cache as a start without JAX_COMPILATION_CACHE_DIR has it."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    monkeypatch.setattr(trust, "reported", set())
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compilation_cache, "LRUCache", lru_cache.LRUCache)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        assert enable_compilation_cache() == tmp_path / "cache"
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        yield tmp_path / "cache" / "xla"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def compiles() -> bool:
    """Compile a program as a later start does; return whether it was compiled rather than read."""
    events: list[str] = []
    listen = lambda name, **_: events.append(name)
    monitoring.register_event_listener(listen)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert jax.jit(lambda x: 3 * x + 1).lower(2.0).compile()(2.0) == 7.0
    finally:
        monitoring.unregister_event_listener(listen)
    return "/jax/compilation_cache/cache_hits" not in events


def test_a_whole_entry_is_read(folder):
    assert [compiles(), compiles()] == [True, False]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def damage(whole: bytes) -> dict[str, bytes]:
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    return {"cut": whole[:middle], "cut a little": whole[:-1], "empty": b"", "flipped": flipped}


@pytest.mark.parametrize("how", ["cut", "cut a little", "empty", "flipped"])
def test_a_damaged_entry_is_made_anew(folder, how):
    assert compiles()
    for path in folder.iterdir():
        path.write_bytes(damage(path.read_bytes())[how])
    assert [compiles(), compiles()] == [True, False]


def test_an_entry_that_others_can_write_is_made_anew(folder):
    assert compiles()
    for path in folder.iterdir():
        path.chmod(0o666)
    assert [compiles(), compiles()] == [True, False]


def test_a_full_disk_keeps_nothing(folder, monkeypatch):
    def full(self, key, value):
        self.entry(key).write_bytes(value[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(lru_cache.LRUCache, "put", full)
        assert compiles()
    assert not list(folder.iterdir())
    assert [compiles(), compiles()] == [True, False]


@cases("limit", [1 << 20, 100], quick=[1 << 20])
def test_the_limit_of_its_size_holds(tmp_path, limit):
    """As with JAX's own: jax_compilation_cache_max_size."""
    pytest.importorskip("filelock")
    cache = CheckedCache(str(tmp_path), max_size=limit)
    for name in "abc":
        cache.put(name, name.encode() * 30)
    found = [cache.get(name) for name in "abc"]
    assert found == ([b"a" * 30, b"b" * 30, b"c" * 30] if limit > 100 else [None, None, b"c" * 30])


def test_a_jax_with_another_cache_has_its_own(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxspec.runtime.checked_cache", None)
    jax.config.update("jax_compilation_cache_dir", None)
    assert enable_compilation_cache() == folder.parent
    assert jax.config.jax_compilation_cache_dir == str(folder)


def test_a_folder_that_cannot_be_trusted_is_not_used(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "xla").symlink_to(folder)
    jax.config.update("jax_compilation_cache_dir", None)
    assert enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None
