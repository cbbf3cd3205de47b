"""Training data on disk: shards of sequences that the target itself wrote, and the rows they are cut into.

A folder holds manifest.json and shard-00000.npz, ...; each shard has tokens [sequences, length] (padded with 0), and
for each sequence length and prompt_length (in tokens), category (index into prompts.CATEGORIES) and temperature. The
length of a sequence that was not written is 0.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.reading import read_json, there, told
from jaxspec.common.errors import UserError
from jaxspec.common.writing import whole

MANIFEST, SHARDS = "manifest.json", "shard-*.npz"
HELDOUT = 0.02  # share of the sequences


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """Sequences in memory.

    tokens [sequences, length]: padded.
    length i32[sequences]: how many of them are real.
    prompt_length i32[sequences]: how many were given; the others are the target's.
    category u8[sequences]: index into CATEGORIES.
    temperature f32[sequences]: at which the target wrote.
    manifest: see `describe`.
    """

    tokens: np.ndarray
    length: np.ndarray
    prompt_length: np.ndarray
    category: np.ndarray
    temperature: np.ndarray
    manifest: dict[str, Any]

    def __len__(self) -> int:
        return len(self.length)

    def select(self, rows: slice) -> Shards:
        arrays = {name: getattr(self, name)[rows] for name in ARRAYS}
        return Shards(**arrays, manifest=self.manifest)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows of T tokens.

    tokens [rows, T].
    mask bool[rows, T]: tokens[b, t] is to be predicted, from tokens[b, :t]; never t = 0.
    """

    tokens: np.ndarray
    mask: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def digest(self) -> str:
        found = hashlib.sha256(f"{self.tokens.dtype}{self.tokens.shape}".encode())
        for array in (self.tokens, self.mask):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()[:12]


ARRAYS = tuple(field.name for field in dataclasses.fields(Shards) if field.name != "manifest")


def id_dtype(vocab_size: int) -> np.dtype:
    """Of token ids on disk."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.npz"


def write_shard(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with whole(path) as partial, partial.open("wb") as file:
        np.savez(file, **{name: arrays[name] for name in ARRAYS})  # type: ignore[arg-type]


def read_shard(path: Path) -> dict[str, np.ndarray]:
    there(path)
    with told(path), np.load(path) as arrays:
        return {name: arrays[name] for name in ARRAYS}


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    with whole(folder / MANIFEST) as partial:
        partial.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises FileNotFoundError where the folder holds no data."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no training data ({MANIFEST} is missing): run jaxspec generate-data")
    return read_json(path)


def load(folder: str | Path) -> Shards:
    """The shards that the manifest counts, into memory: 2 bytes a token for vocabularies up to 65,536.

    Raises FileNotFoundError for a folder without data.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    shards = [read_shard(shard_path(folder, i)) for i in range(manifest["shards"])]
    written = [{name: shard[name][shard["length"] > 0] for name in ARRAYS} for shard in shards]
    if not any(len(shard["length"]) for shard in written):
        raise FileNotFoundError(f"{folder} holds no sequence yet: run jaxspec generate-data again")
    joined = {name: np.concatenate([shard[name] for shard in written]) for name in ARRAYS}
    return Shards(**joined, manifest=manifest)


def heldout(shards: Shards) -> Shards:
    """The last sequences, never among those of `training`."""
    return shards.select(slice(len(shards) - num_heldout(shards), None))


def training(shards: Shards) -> Shards:
    """All sequences but those of `heldout`."""
    return shards.select(slice(0, len(shards) - num_heldout(shards)))


def num_heldout(shards: Shards) -> int:
    return max(1, round(HELDOUT * len(shards)))


def packed(shards: Shards, seed: int, length: int) -> Rows:
    """The sequences in an order of the seed's, joined in a stream that is cut into rows, so that no position is
    padding. An incomplete last row is left out.

    A row may begin inside a sequence; what it lacks of the beginning is lacking for the target too, whose distribution
    is computed over the same row.
    """
    order = np.random.default_rng(seed).permutation(len(shards))
    position = np.arange(shards.tokens.shape[1])
    there = position < shards.length[order, None]
    written = position >= shards.prompt_length[order, None]
    cut = lambda stream: stream[: len(stream) // length * length].reshape(-1, length)
    tokens, mask = cut(shards.tokens[order][there]), cut(written[there])
    mask[:, 0] = False
    return Rows(tokens, mask)


def chosen(count: int, seed: int, step: int, batch_size: int) -> np.ndarray:
    """Which of `count` rows a step takes, i64[B]: a pure function of its arguments.

    The first epoch takes them as they lie, so that a run which ends in it needs the first ones only; every later epoch
    takes them in another order.

    Raises: UserError where there are less than one batch.
    """
    steps = count // batch_size
    if not steps:
        raise UserError(
            f"the data makes {count} rows, less than one batch of {batch_size}: generate more, or lower --batch-size "
            "or --length"
        )
    epoch, step = divmod(step, steps)
    return arranged(count, seed, epoch)[step * batch_size : (step + 1) * batch_size]


@functools.lru_cache(maxsize=2)
def arranged(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the rows in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count) if epoch else np.arange(count)


def frequencies(shards: Shards, vocab_size: int) -> np.ndarray:
    """How often the target wrote each id, i64[V]. Prompts do not count."""
    counts = np.zeros(vocab_size, np.int64)
    position = np.arange(shards.tokens.shape[1])
    for start in range(0, len(shards), 4096):
        part = shards.select(slice(start, start + 4096))
        written = (position >= part.prompt_length[:, None]) & (position < part.length[:, None])
        counts += np.bincount(part.tokens[written], minlength=vocab_size)
    return counts
