"""Training data on disk: shards (files) of token sequences that the target wrote, and training rows made of them.

A folder holds manifest.json and shard-00000.npz, ... The arrays of a shard are tokens [sequences, length], padded with
0, and for each sequence its length and prompt_length in tokens, its category (index into prompts.CATEGORIES) and its
temperature. A sequence that is not written yet has length 0.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.reading import is_regular_file, naming_file, read_json
from jaxspec.common.errors import UserError
from jaxspec.common.writing import whole
from jaxspec.train.prompts import CATEGORIES

MANIFEST, SHARDS = "manifest.json", "shard-*.npz"
HELDOUT = 0.02  # share of the sequences that is not trained on, but serves to measure the draft


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """Token sequences of the training data, in memory.

    tokens [sequences, length]: token ids, padded.
    length i32[sequences]: number of tokens without padding.
    prompt_length i32[sequences]: number of prompt tokens; the target wrote the rest.
    category u8[sequences]: index of the prompt's category in CATEGORIES.
    temperature f32[sequences]: sampling temperature at which the target wrote.
    manifest: contents of the folder's manifest.json; see `new_manifest`.
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
        """Return the sequences in this slice."""
        arrays = {name: getattr(self, name)[rows] for name in ARRAYS}
        return Shards(**arrays, manifest=self.manifest)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Training rows of T tokens each.

    tokens [rows, T]: token ids.
    mask bool[rows, T]: True where the draft learns to predict tokens[b, t] from tokens[b, :t]; False at t = 0.
    """

    tokens: np.ndarray
    mask: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the tokens and the mask, to recognise the same rows."""
        found = hashlib.sha256(f"{self.tokens.dtype}{self.tokens.shape}".encode())
        for array in (self.tokens, self.mask):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()[:12]


ARRAYS = tuple(field.name for field in dataclasses.fields(Shards) if field.name != "manifest")


def id_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype in which token ids of a vocabulary of this size are stored on disk."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def shard_path(folder: Path, index: int) -> Path:
    """Return the path of the shard with this index."""
    return folder / f"shard-{index:05d}.npz"


def write_shard(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a shard's arrays to a file, completely or not at all.

    A thread writes the file, because Python raises KeyboardInterrupt in the main thread only. zipfile cannot close a
    file in whose midst an interrupt came, and fails with an error of its own.
    """
    with whole(path) as partial, partial.open("wb") as file, ThreadPoolExecutor(1) as pool:
        pool.submit(np.savez, file, **{name: arrays[name] for name in ARRAYS}).result()  # type: ignore[arg-type]


def read_shard(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a shard. Raises: UserError that names the file if it cannot be read."""
    is_regular_file(path)
    with naming_file(path), np.load(path) as arrays:
        return {name: arrays[name] for name in ARRAYS}


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest.json of a data folder."""
    with whole(folder / MANIFEST) as partial:
        partial.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's manifest.json. Raises: FileNotFoundError if the folder holds no data."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no training data ({MANIFEST} is missing): run jaxspec generate-data")
    return read_json(path)


def check_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    """Raise UserError if the folder holds data of another recipe (target and options of the sequences)."""
    if not (folder / MANIFEST).is_file() or not any(folder.glob(SHARDS)):
        return
    found = read_manifest(folder)
    for name, wanted in recipe.items():
        if found.get(name, wanted) != wanted:
            raise UserError(
                f"{folder} holds data with {name}={found.get(name)!r}, not {wanted!r}: choose another folder, or the "
                "same options to add to it"
            )


def update_counts(folder: Path, done: dict[int, Counter[str]], size: int = 0) -> None:
    """Update `done`, the counts of each shard by its index, from the shards on disk.

    Earlier runs or other processes may have written shards.

    size: number of sequences in a complete shard. A shard whose count in `done` is complete is not read again.
    """
    for index in sorted(int(path.stem.removeprefix("shard-")) for path in folder.glob(SHARDS)):
        if index not in done or done[index]["sequences"] < size:
            done[index] = counts(read_shard(shard_path(folder, index)))


def counts(arrays: dict[str, np.ndarray]) -> Counter[str]:
    """Return a shard's numbers of sequences, tokens and prompt tokens, and its number of sequences of each category."""
    written = arrays["length"] > 0
    sizes = {
        "sequences": int(written.sum()),
        "tokens": int(arrays["length"].sum()),
        "prompt_tokens": int(arrays["prompt_length"].sum()),
    }
    return Counter(sizes) + Counter(CATEGORIES[i] for i in arrays["category"][written])


def new_manifest(recipe: dict[str, Any], done: dict[int, Counter[str]], tokens: int) -> dict[str, Any]:
    """Return a new manifest: the recipe (target and options of the data), the device, and counts of the first shards.

    Shards are counted from the first on, until they have `tokens` tokens or the next one is not on disk. So shards
    beyond these tokens, or beyond a missing shard, do not change the manifest.

    done: counts of the shards on disk, by index.
    """
    total: Counter[str] = Counter()
    shards = 0
    while shards in done and total["tokens"] < tokens:
        total += done[shards]
        shards += 1
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    sizes = {name: total[name] for name in ("sequences", "tokens", "prompt_tokens")}
    return {
        **recipe,
        "device": device,
        "shards": shards,
        **sizes,
        "categories": {name: total[name] for name in CATEGORIES},
    }


def load(folder: str | Path) -> Shards:
    """Load the sequences of a folder, from the shards that its manifest counts.

    A token, or a place of padding, takes 2 bytes for vocabularies up to 65,536 ids, else 4.

    Raises: FileNotFoundError for a folder without data, UserError for a shard that cannot be read.
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
    """Return the held-out sequences, on which drafts are measured. They are the last ones."""
    return shards.select(slice(len(shards) - num_heldout(shards), None))


def training(shards: Shards) -> Shards:
    """Return the sequences to train on: all but the held-out ones."""
    return shards.select(slice(0, len(shards) - num_heldout(shards)))


def num_heldout(shards: Shards) -> int:
    """Return the number of held-out sequences, at least 1."""
    return max(1, round(HELDOUT * len(shards)))


def packed(shards: Shards, seed: int, length: int) -> Rows:
    """Return training rows without padding: the sequences in random order, joined and divided into rows.

    seed: seed of the order. length: tokens of a row.

    An incomplete last row is dropped. A row may begin inside a sequence. The target then lacks the same context as the
    draft, because its distribution is computed over the same row.
    """
    order = np.random.default_rng(seed).permutation(len(shards))
    position = np.arange(shards.tokens.shape[1])
    present = position < shards.length[order, None]
    written = position >= shards.prompt_length[order, None]
    stream, predicted = shards.tokens[order][present], written[present]
    size = len(stream) // length * length  # number of tokens in the complete rows
    tokens = stream[:size].reshape(-1, length)
    mask = predicted[:size].reshape(-1, length)
    mask[:, 0] = False
    return Rows(tokens, mask)


def chosen(count: int, seed: int, step: int, batch_size: int) -> np.ndarray:
    """Return the indices i64[B] of the rows of a training step, among `count` rows. They depend on the arguments only.

    The first epoch takes the rows in their order, so that a run that ends within it needs only the first rows. Every
    later epoch takes them in another random order.

    Raises: UserError if the rows are fewer than one batch.
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
    """Return the order of the rows in an epoch: unchanged in the first epoch, else random."""
    return np.random.default_rng([seed, epoch]).permutation(count) if epoch else np.arange(count)


def frequencies(shards: Shards, vocab_size: int) -> np.ndarray:
    """Return the number of times i64[V] that the target wrote each id. Tokens of prompts do not count."""
    counts = np.zeros(vocab_size, np.int64)
    position = np.arange(shards.tokens.shape[1])
    for start in range(0, len(shards), 4096):
        part = shards.select(slice(start, start + 4096))
        written = (position >= part.prompt_length[:, None]) & (position < part.length[:, None])
        counts += np.bincount(part.tokens[written], minlength=vocab_size)
    return counts
