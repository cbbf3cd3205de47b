"""Training data on disk: shards of sequences that the target itself wrote, and the batches they are cut into.

A folder holds manifest.json and shard-00000.npz, ...; each shard has tokens [N, L] (padded with 0), and for each
sequence length and prompt_length (in tokens), category (index into prompts.CATEGORIES) and temperature.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

MANIFEST = "manifest.json"
HELDOUT = 0.02  # share of the sequences
Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """N sequences in memory: tokens [N, L]; length, prompt_length i32[N]; category u8[N]; temperature f32[N].

    The first prompt_length tokens were given, the others up to length are the target's. manifest: see `describe`.
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


ARRAYS = tuple(field.name for field in dataclasses.fields(Shards) if field.name != "manifest")


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.npz"


def write_shard(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Only a complete file ever gets the final name."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, **{name: arrays[name] for name in ARRAYS})  # type: ignore[arg-type]
    os.replace(partial, path)


def read_shard(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in ARRAYS}


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises FileNotFoundError where the folder holds no data."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no training data ({MANIFEST} is missing): run jaxspec generate-data")
    return json.loads(path.read_text(encoding="utf-8"))


def load(folder: str | Path) -> Shards:
    """The shards that the manifest counts, into memory: 2 bytes a token for vocabularies up to 65,536.

    Raises FileNotFoundError for a folder without data.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    shards = [read_shard(shard_path(folder, i)) for i in range(manifest["shards"])]
    if not shards:
        raise FileNotFoundError(f"{folder} holds no finished shard yet: run jaxspec generate-data again")
    joined = {name: np.concatenate([shard[name] for shard in shards]) for name in ARRAYS}
    return Shards(**joined, manifest=manifest)


def heldout(shards: Shards) -> Shards:
    """The last sequences, never among those of `training`."""
    return shards.select(slice(len(shards) - num_heldout(shards), None))


def training(shards: Shards) -> Shards:
    """All sequences but those of `heldout`."""
    return shards.select(slice(0, len(shards) - num_heldout(shards)))


def num_heldout(shards: Shards) -> int:
    return max(1, round(HELDOUT * len(shards)))


def batches(shards: Shards, seed: int, step: int, batch_size: int, length: int, *, prompts: bool = False) -> Batch:
    """The batch of a step: a pure function of its arguments.

    Every epoch the sequences are joined in another order, and the stream is cut into rows, so that no position is
    padding. A row may begin inside a sequence; what it lacks of the beginning is lacking for the target too, whose
    distribution is computed over the same row.

    Args:
      prompts: count the prompts' tokens too.

    Returns:
      tokens i32[B, L]; mask bool[B, L]: tokens[b, t] is to be predicted, from tokens[b, :t]. Never t = 0.

    Raises: ValueError where the shards hold less than one batch.
    """
    num_tokens = int(np.sum(shards.length, dtype=np.int64))
    steps = num_tokens // (batch_size * length)
    if not steps:
        raise ValueError(
            f"{num_tokens} tokens are less than one batch of {batch_size} x {length}: generate more or lower them"
        )
    epoch, step = divmod(step, steps)
    order, ends = arranged(shards, seed, epoch)
    at = step * batch_size * length + np.arange(batch_size * length)
    place = np.searchsorted(ends, at, side="right")
    sequence = order[place]
    offset = at - ends[place] + shards.length[sequence]
    first = 1 if prompts else shards.prompt_length[sequence]
    mask = (offset >= first).reshape(batch_size, length)
    mask[:, 0] = False
    return {"tokens": shards.tokens[sequence, offset].astype(np.int32).reshape(batch_size, length), "mask": mask}


@functools.lru_cache(maxsize=2)
def arranged(shards: Shards, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The sequences' order in an epoch, and where each ends in the stream of their tokens."""
    order = np.random.default_rng([seed, epoch]).permutation(len(shards))
    return order, np.cumsum(shards.length[order], dtype=np.int64)


def frequencies(shards: Shards, vocab_size: int) -> np.ndarray:
    """How often the target wrote each id, i64[V]. Prompts do not count."""
    counts = np.zeros(vocab_size, np.int64)
    position = np.arange(shards.tokens.shape[1])
    for start in range(0, len(shards), 4096):
        part = shards.select(slice(start, start + 4096))
        written = (position >= part.prompt_length[:, None]) & (position < part.length[:, None])
        counts += np.bincount(part.tokens[written], minlength=vocab_size)
    return counts
