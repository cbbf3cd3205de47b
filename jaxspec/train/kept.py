"""Results of target passes over the training rows, computed once and kept beside the data: one record per row."""

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
from jaxspec.common.progress import token_progress, write_line
from jaxspec.common.writing import disk_errors
from jaxspec.models.model import Model
from jaxspec.parallel.placement import Placement
from jaxspec.train.ahead import ahead
from jaxspec.train.data import Rows
from jaxspec.train.step import place_rows

# Function from tokens i32[B,T] of B rows to the fields [B,...] of their records, computed on the devices.
Find = Callable[[jax.Array], Mapping[str, jax.Array]]


class Records:
    """The records of the first `count` training rows, in one file. A record holds the results for one row.

    A record is computed when it is first needed, and read from disk when it is indexed. The file grows by a batch at a
    time, so a later run reuses the records of a run that was stopped or needed fewer rows.

    Args:
      path: the file. Its name must identify everything that the records depend on.
      record: dtype of a record.
      rows: all training rows.
      count: number of rows that have a record.
      find: function that computes the records of a batch.
      what: description of the records, for messages.
      remedy: advice on how to need less disk space, for the error message.
      batch_size: number of rows in a pass, sharded over the devices.
      devices: placement over all devices.
    Raises: UserError if the disk has no room for the records.
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
        self.path = path
        self.dtype = record
        self.rows = rows
        self.count = count
        self.find = find
        self.place = place_rows(devices)
        self.what = what
        self.batch_size = batch_size
        self.known = self.read()
        self.seconds = 0.0  # seconds that the newest batch took to compute
        size = (count - len(self.known)) * record.itemsize
        free = shutil.disk_usage(path.parent).free
        if size > free:
            raise UserError(f"{path} needs {size / 1e9:.1f} GB more, {free / 1e9:.1f} are free: {remedy}")
        about = f"{what} of {count * self.length:,} tokens: {count * record.itemsize / 1e9:.2f} GB in {path}"
        write_line(f"{about} (found there)" if len(self.known) == count else about)

    @property
    def length(self) -> int:
        return int(self.rows.tokens.shape[1])

    def read(self) -> np.ndarray:
        """Return the records that the file holds, at most `count`."""
        size = self.path.stat().st_size if self.path.is_file() else 0
        there = min(size // self.dtype.itemsize, self.count)
        return np.memmap(self.path, self.dtype, "r", shape=(there,)) if there else np.empty(0, self.dtype)

    def up_to(self, count: int, over: Callable[[float], bool] = lambda seconds: False) -> np.ndarray:
        """Return the records of the first `count` rows. Compute and write those that are missing.

        over(seconds): whether the run's time will be up after so many seconds. If two more batches do not fit into the
          time, no further one begins, and the result may have fewer records.
        """
        done = len(self.known)
        count = min(count, self.count)
        if done >= count:
            return self.known[:count]
        # Two batches must fit into the time that is left: one is being computed while the next one starts.
        starts = itertools.takewhile(lambda _: not over(2 * self.seconds), range(done, count, self.batch_size))
        self.path.touch()
        with (
            disk_errors(self.path),
            self.path.open("r+b") as file,
            contextlib.closing(ahead(self.ask, starts)) as answers,
            token_progress(f"computing {self.what}", count * self.length, done * self.length) as report,
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
                now = time.perf_counter()
                self.seconds, since = now - since, now
        self.known = self.read()
        return self.known[:count]

    def ask(self, start: int) -> Mapping[str, jax.Array]:
        """Start computing a batch of records, from row `start` on. If the rows run out, the last one is repeated."""
        chosen = np.arange(start, start + self.batch_size).clip(max=self.count - 1)
        return self.find(self.place(self.rows.tokens[chosen].astype(np.int32)))


def digest(target: Model, rows: Rows) -> str:
    """Return a hash of the rows, the target's configuration, and the first row of each of the target's parameters."""
    found = hashlib.sha256(rows.digest.encode())
    found.update(json.dumps(target.config.to_json(), sort_keys=True).encode())
    for name in sorted(target.params):
        found.update(np.asarray(target.params[name][:1]).tobytes())
    return found.hexdigest()[:12]
