"""What a pass over all the data finds, once: records on disk beside the data, a row each."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np

from jaxspec.engine.setup import Model
from jaxspec.errors import UserError
from jaxspec.parallel.placement import Placement
from jaxspec.progress import say, token_progress
from jaxspec.train.ahead import ahead
from jaxspec.train.data import Rows
from jaxspec.train.step import place_rows
from jaxspec.writing import disk_errors

# tokens i32[B,T] on the devices -> the fields of their records, [B,...] each
Find = Callable[[jax.Array], Mapping[str, jax.Array]]


def kept(
    path: Path,
    record: np.dtype,
    rows: Rows,
    count: int,
    find: Find,
    *,
    what: str,
    remedy: str,
    batch_size: int,
    devices: Placement,
) -> np.ndarray:
    """The records [count] of the first `count` rows, which are read from disk when they are indexed.

    The file grows a batch at a time: a run that was ended, or that needed fewer rows, has done its part of the work for
    the next one. Its name has to tell whatever the records depend on.

    Args:
      what: they are, in words; remedy: what makes them fewer.
      batch_size: rows of a pass, which the devices share.

    Raises: UserError where the disk has no room for them.
    """
    length = rows.tokens.shape[1]
    done = path.stat().st_size // record.itemsize if path.is_file() else 0
    size, free = (count - done) * record.itemsize, shutil.disk_usage(path.parent).free
    if size > free:
        raise UserError(f"{path} needs {size / 1e9:.1f} GB more, {free / 1e9:.1f} are free: {remedy}")
    about = f"{what} of {count * length:,} tokens: {count * record.itemsize / 1e9:.2f} GB in {path}"
    say(about + " (found there)" * (done >= count))
    place = place_rows(devices)

    def ask(start: int) -> Mapping[str, jax.Array]:
        part = rows.tokens[np.arange(start, start + batch_size).clip(max=count - 1)]
        return find(place(part.astype(np.int32)))

    starts = range(done, count, batch_size)
    if starts:
        path.touch()
        with (
            disk_errors(path),
            path.open("r+b") as file,
            contextlib.closing(ahead(ask, starts)) as answers,
            token_progress(count * length, done * length, enabled=True) as report,
        ):
            file.seek(done * record.itemsize)
            for start, answer in zip(starts, answers, strict=True):
                records = np.empty(batch_size, record)
                for name, value in jax.device_get(answer).items():
                    records[name] = value
                now = min(start + batch_size, count)
                file.write(records[: now - start].tobytes())
                report(now * length)
    return np.memmap(path, record, "r", shape=(count,))


def digest(target: Model, rows: Rows) -> str:
    """Of the rows, of the target's configuration, and of the first row of each of its parameters."""
    found = hashlib.sha256(rows.digest.encode())
    found.update(json.dumps(target.config.to_json(), sort_keys=True).encode())
    for name in sorted(target.params):
        found.update(np.asarray(target.params[name][:1]).tobytes())
    return found.hexdigest()[:12]
