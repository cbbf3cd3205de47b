"""What passes over the data find, once: records on disk beside the data, a row each."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np

from jaxspec.common.errors import UserError
from jaxspec.common.progress import say, token_progress
from jaxspec.common.writing import disk_errors
from jaxspec.models.model import Model
from jaxspec.parallel.placement import Placement
from jaxspec.train.ahead import ahead
from jaxspec.train.data import Rows
from jaxspec.train.step import place_rows

# tokens i32[B,T] on the devices -> the fields of their records, [B,...] each
Find = Callable[[jax.Array], Mapping[str, jax.Array]]


class Records:
    """Records [count] of the first `count` rows, each found when it is first needed, and read from disk when it is
    indexed.

    The file grows a batch at a time: a run that was ended, or that needed fewer rows, has done its part of the work for
    the next one. Its name has to tell whatever the records depend on.

    Args:
      what: they are, in words; remedy: what makes them fewer.
      batch_size: rows of a pass, which the devices share.

    Raises: UserError where the disk has no room for them.
    """

    def __init__(
        self,
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
    ) -> None:
        self.path, self.dtype, self.rows, self.count = path, record, rows, count
        self.what, self.batch_size = what, batch_size
        place = place_rows(devices)
        self.find = lambda tokens: find(place(tokens.astype(np.int32)))
        self.known, self.seconds = self.read(), 0.0
        size, free = (count - len(self.known)) * record.itemsize, shutil.disk_usage(path.parent).free
        if size > free:
            raise UserError(f"{path} needs {size / 1e9:.1f} GB more, {free / 1e9:.1f} are free: {remedy}")
        about = f"{what} of {count * self.length:,} tokens: {count * record.itemsize / 1e9:.2f} GB in {path}"
        say(about + " (found there)" * (len(self.known) == count))

    @property
    def length(self) -> int:
        return self.rows.tokens.shape[1]

    def read(self) -> np.ndarray:
        """What the file holds, as far as it is asked for."""
        size = self.path.stat().st_size if self.path.is_file() else 0
        there = min(size // self.dtype.itemsize, self.count)
        return np.memmap(self.path, self.dtype, "r", shape=(there,)) if there else np.empty(0, self.dtype)

    def upto(self, count: int, over: Callable[[float], bool] = lambda seconds: False) -> np.ndarray:
        """The records of the first `count` rows; fewer where it is over before. over(seconds): whether it will be when
        these have passed."""
        done, count = len(self.known), min(count, self.count)
        if done >= count:
            return self.known[:count]
        starts = itertools.takewhile(lambda _: not over(2 * self.seconds), range(done, count, self.batch_size))
        self.path.touch()
        with (
            disk_errors(self.path),
            self.path.open("r+b") as file,
            contextlib.closing(ahead(self.ask, starts)) as answers,
            token_progress(f"finding {self.what}", count * self.length, done * self.length) as report,
        ):
            file.seek(done * self.dtype.itemsize)
            since = time.perf_counter()
            for answer in answers:
                records = np.empty(self.batch_size, self.dtype)
                for field, value in jax.device_get(answer).items():
                    records[field] = value
                new = min(self.batch_size, self.count - done)
                file.write(records[:new].tobytes())
                done += new
                report(done * self.length)
                self.seconds, since = time.perf_counter() - since, time.perf_counter()
        self.known = self.read()
        return self.known[:count]

    def ask(self, start: int) -> Mapping[str, jax.Array]:
        return self.find(self.rows.tokens[np.arange(start, start + self.batch_size).clip(max=self.count - 1)])


def digest(target: Model, rows: Rows) -> str:
    """Of the rows, of the target's configuration, and of the first row of each of its parameters."""
    found = hashlib.sha256(rows.digest.encode())
    found.update(json.dumps(target.config.to_json(), sort_keys=True).encode())
    for name in sorted(target.params):
        found.update(np.asarray(target.params[name][:1]).tobytes())
    return found.hexdigest()[:12]
