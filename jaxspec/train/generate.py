"""Training data from the target: thousands of rows at once through the engine, shards on disk as they are complete."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import checkpoints
from jaxspec.engine.request import Request
from jaxspec.errors import UserError
from jaxspec.progress import token_progress
from jaxspec.train.ahead import ahead
from jaxspec.train.data import (
    MANIFEST,
    SHARDS,
    id_dtype,
    read_manifest,
    read_shard,
    shard_path,
    write_manifest,
    write_shard,
)
from jaxspec.train.data_options import DataOptions
from jaxspec.train.openings import Opening, openings, with_message
from jaxspec.train.prompts import CATEGORIES

if TYPE_CHECKING:
    from jaxspec.llm import LLM

REFILL = 8  # eighths of the rows are filled again at a time


class Shard:
    """A shard under way."""

    def __init__(self, index: int, openings: list[Opening], length: int, vocab_size: int) -> None:
        self.index, self.openings = index, openings
        count = len(openings)
        self.arrays = {
            "tokens": np.zeros((count, length), id_dtype(vocab_size)),
            "length": np.zeros(count, np.int32),
            "prompt_length": np.zeros(count, np.int32),
            "category": np.array([opening.category for opening in openings], np.uint8),
            "temperature": np.array([opening.temperature for opening in openings], np.float32),
        }
        self.left, self.num_tokens = count, 0  # of the sequences that have ended

    def take(self, row: int, request: Request) -> None:
        """A sequence has ended."""
        self.arrays["tokens"][row, : request.num_tokens] = request.tokens
        self.arrays["length"][row] = request.num_tokens
        self.arrays["prompt_length"][row] = len(request.prompt)
        self.left, self.num_tokens = self.left - 1, self.num_tokens + request.num_tokens


def generate(llm: LLM, out: str | Path, options: DataOptions, *, target: str = "", progress: bool = True) -> dict:
    """Fills the folder `out` until it holds options.tokens, and returns its manifest. Shards that exist are kept.

    llm: made with `engine_options`; target: its name, for the manifest. On one kind of device with one version of JAX
    the shards are the same whenever they are made. Elsewhere, or with other `rows`, products round differently, and a
    sequence may take another turn at a token where two were nearly equal.

    Raises: UserError where the folder holds data of another recipe; RuntimeError where the engine failed.
    """
    folder, engine = Path(out), llm.engine
    folder.mkdir(parents=True, exist_ok=True)
    made_by = {"target": target, "tokenizer": checkpoints.fingerprint(llm.tokenizer)}
    recipe = {**made_by, "vocab_size": engine.limits.vocab_size, **options.recipe}
    done: dict[int, Counter[str]] = {}
    at_once, mine = engine.config.max_num_seqs, -(-options.tokens // options.part[1])
    indices = (index for index in itertools.count() if options.takes(index) and index not in done)
    waiting: deque[tuple[Shard, int]] = deque()
    running: dict[Request, tuple[Shard, int]] = {}
    under_way: dict[int, Shard] = {}

    def num_tokens() -> int:
        """Of this part. What lies behind a gap does not count: nobody reads it before that is filled."""
        own = filter(options.takes, itertools.count())
        gap = next(index for index in own if index not in done and index not in under_way)
        ended = sum(count["tokens"] for index, count in done.items() if options.takes(index) and index < gap)
        return ended + sum(s.num_tokens for s in under_way.values()) + sum(r.num_tokens for r in running)

    def refill() -> None:
        """Starts messages and answers where rows are free: one, two or four eighths of the rows at a time, because
        newcomers interrupt the others and every other number would compile another program."""
        eighth = max(at_once // REFILL, 1)
        free = (at_once - len(running)) // eighth
        if not free:
            return
        for _ in range(eighth << (free.bit_length() - 1) if running else at_once):
            if not waiting:
                if num_tokens() >= mine:
                    return
                index, begun = next(fresh)
                under_way[index] = shard = Shard(index, begun, options.length, engine.limits.vocab_size)
                # Messages first: at the end there are answers to start, so many at a time, and none has to wait.
                waiting.extend(
                    (shard, row) for row in sorted(range(len(begun)), key=lambda row: not begun[row].attempt)
                )
            shard, row = waiting.popleft()
            opening = shard.openings[row]
            running[engine.add(opening.ids, opening.params(options.length), stop_ids=llm.stop_ids)] = shard, row

    def ended(request: Request) -> None:
        """A message is followed by its answer, or by another attempt, at once; an answer ends its sequence."""
        if request.finish_reason == "error":
            raise RuntimeError(f"generation failed: {request.error}; where memory is short, lower --rows")
        shard, row = running.pop(request)
        if shard.openings[row].attempt:
            shard.openings[row] = with_message(llm, shard.openings[row], request)
            waiting.appendleft((shard, row))
            return
        shard.take(row, request)
        if not shard.left:
            write_shard(shard_path(folder, shard.index), shard.arrays)
            done[shard.index] = counts(under_way.pop(shard.index).arrays)
            describe()

    def describe() -> dict[str, Any]:
        check_recipe(folder, recipe)  # of others, too, which may be filling it
        look(folder, done)
        described = manifest(recipe, done, options.tokens)
        write_manifest(folder, described)
        return described

    describe()  # before the first shard: whoever ends here, or begins beside this one, is not to mix two recipes
    try:
        with (
            contextlib.closing(ahead(lambda index: (index, openings(llm, options, index)), indices)) as fresh,
            token_progress(mine, num_tokens(), enabled=progress) as report,
        ):
            while True:
                refill()
                if not running:
                    break
                for request in engine.step():
                    if request.finish_reason is not None:
                        ended(request)
                report(num_tokens())
    finally:
        for request in running:  # after an interrupt
            engine.abort(request)
    return describe()


def kept(folder: Path) -> str:
    """What an interrupt leaves of `generate`, and how to go on, in words."""
    count = len(list(folder.glob(SHARDS)))
    if not count:
        return f"no shard was finished, nothing is kept in {folder}"
    return f"{count} shard{'s' if count > 1 else ''} kept in {folder}: the same command goes on from there"


def check_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    if not (folder / MANIFEST).is_file() or not any(folder.glob(SHARDS)):  # nothing is kept of another recipe
        return
    there = read_manifest(folder)
    for name, wanted in recipe.items():
        if there.get(name, wanted) != wanted:
            raise UserError(
                f"{folder} holds data with {name}={there.get(name)!r}, not {wanted!r}: choose another folder, or the "
                "same options to add to it"
            )


def look(folder: Path, done: dict[int, Counter[str]]) -> None:
    """Adds what the shards on disk hold that are not in `done` yet: those of earlier runs, and of other parts."""
    for index in sorted(int(path.stem.removeprefix("shard-")) for path in folder.glob(SHARDS)):
        if index not in done:
            done[index] = counts(read_shard(shard_path(folder, index)))


def counts(arrays: dict[str, np.ndarray]) -> Counter[str]:
    """Of a finished shard."""
    names = (CATEGORIES[i] for i in arrays["category"])
    tokens, given = int(arrays["length"].sum()), int(arrays["prompt_length"].sum())
    return Counter({"sequences": len(arrays["length"]), "tokens": tokens, "prompt_tokens": given}) + Counter(names)


def manifest(recipe: dict[str, Any], done: dict[int, Counter[str]], tokens: int) -> dict[str, Any]:
    """The recipe, and what the first shards hold: as many as there are without a gap, and as make up `tokens`. Thus
    it does not depend on the order in which they were finished, nor on how far the last rows had got."""
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
