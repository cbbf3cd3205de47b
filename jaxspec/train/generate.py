"""Training data from the target: thousands of rows at once through the engine, on disk every few seconds."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import checkpoints
from jaxspec.common.errors import UserError
from jaxspec.common.progress import token_progress
from jaxspec.engine.request import Request
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
    from jaxspec.api.llm import LLM

REFILL = 8  # eighths of the rows are filled again at a time
SAVE_EVERY = 10.0  # seconds


class Shard:
    """A shard under way. changed: it holds more than its file does."""

    def __init__(self, openings: list[Opening], length: int, vocab_size: int) -> None:
        self.openings, self.changed = openings, False
        count = len(openings)
        self.arrays = {
            "tokens": np.zeros((count, length), id_dtype(vocab_size)),
            "length": np.zeros(count, np.int32),
            "prompt_length": np.zeros(count, np.int32),
            "category": np.array([opening.category for opening in openings], np.uint8),
            "temperature": np.array([opening.temperature for opening in openings], np.float32),
        }

    def take(self, row: int, request: Request) -> None:
        """A sequence has ended."""
        self.arrays["tokens"][row, : request.num_tokens] = request.tokens
        self.arrays["length"][row] = request.num_tokens
        self.arrays["prompt_length"][row] = len(request.prompt)
        self.changed = True


def generate(llm: LLM, out: str | Path, options: DataOptions, *, target: str = "", progress: bool = True) -> dict:
    """Fills the folder `out` until it holds options.tokens, and returns its manifest. Sequences that exist are kept.

    llm: made with `engine_options`; target: its name, for the manifest. On one kind of device with one version of JAX
    the data are the same, however often the run was ended and begun again. Elsewhere, or with other `rows`, products
    round differently, and a sequence may take another turn at a token where two were nearly equal.

    Raises: UserError where the folder holds data of another recipe; RuntimeError where the engine failed.
    """
    folder, engine = Path(out), llm.engine
    folder.mkdir(parents=True, exist_ok=True)
    made_by = {"target": target, "tokenizer": checkpoints.fingerprint(llm.tokenizer)}
    recipe = {**made_by, "vocab_size": engine.limits.vocab_size, **options.recipe}
    done: dict[int, Counter[str]] = {}  # what the shards on disk hold
    at_once, mine = engine.config.max_num_seqs, -(-options.tokens // options.part[1])
    own = lambda: filter(options.takes, itertools.count())
    whole = lambda index: index in done and done[index]["sequences"] == options.shard_size
    waiting: deque[tuple[Shard, int]] = deque()
    running: dict[Request, tuple[Shard, int]] = {}
    under_way: dict[int, Shard] = {}
    touched: set[int] = set()
    line: deque[tuple[np.ndarray, int]] = deque()  # sequences in order: lengths, and where; from the first not there
    passed = num_passed = 0  # tokens and sequences that are there, before the next one that is to be begun
    settled, saved = 0, time.monotonic()  # tokens of the sequences before that line; when it was written

    def missing() -> Iterator[tuple[Shard, int] | None]:
        """The sequences that are not there, in order; None where some that are there were passed."""
        nonlocal passed, num_passed
        last = -1
        for index, begun in fresh:
            for i in filter(options.takes, range(last + 1, index)):
                passed, num_passed = passed + done[i]["tokens"], num_passed + done[i]["sequences"]
                line.append((np.array([done[i]["tokens"]]), 0))
            yield None
            shard, last = Shard(begun, options.length, engine.limits.vocab_size), index
            if index in done:
                shard.arrays = read_shard(shard_path(folder, index))
            under_way[index] = shard
            touched.add(index)
            for row, length in enumerate(shard.arrays["length"].tolist()):
                passed, num_passed = passed + length, num_passed + (length > 0)
                line.append((shard.arrays["length"], row))
                yield None if length else (shard, row)

    def settle() -> int:
        """Tokens of the sequences that are there, up to the first that is not."""
        nonlocal settled
        while line and (length := int(line[0][0][line[0][1]])):
            settled += length
            line.popleft()
        return settled

    def num_tokens(least: int = 0) -> int:
        """As far as they are begun. least: what a sequence counts that has not ended."""
        return passed + sum(max(request.num_tokens, least) for request in running)

    def refill() -> None:
        """Starts messages and answers where rows are free: one, two or four eighths of the rows at a time, because
        newcomers interrupt the others and every other number would compile another program."""
        eighth = max(at_once // REFILL, 1)
        free = (at_once - len(running)) // eighth
        if not free:
            return
        usual = passed // num_passed if num_passed else options.length // 2
        enough = num_tokens(usual) >= mine
        for _ in range(eighth << (free.bit_length() - 1) if running else at_once):
            while not waiting:
                if enough:
                    return
                if (found := next(rows)) is None:
                    enough = num_tokens() >= mine
                else:
                    waiting.append(found)
            shard, row = waiting.popleft()
            opening = shard.openings[row]
            running[engine.add(opening.ids, opening.params(options.length), stop_ids=llm.stop_ids)] = shard, row

    def ended(request: Request) -> None:
        """A message is followed by its answer, or by another attempt, at once; an answer ends its sequence."""
        nonlocal passed, num_passed
        if request.finish_reason == "error":
            raise RuntimeError(f"generation failed: {request.error}; where memory is short, lower --rows")
        shard, row = running.pop(request)
        if shard.openings[row].attempt:
            shard.openings[row] = with_message(llm, shard.openings[row], request)
            waiting.appendleft((shard, row))
            return
        shard.take(row, request)
        passed, num_passed = passed + request.num_tokens, num_passed + 1

    def save() -> None:
        """Writes what has ended. A shard of which nothing has is written, too: behind a gap nothing would be read."""
        nonlocal saved
        for index, shard in list(under_way.items()):
            if shard.changed or index not in done:
                write(index, shard.arrays)
                shard.changed = False
            if whole(index):
                del under_way[index]
        describe()
        saved = time.monotonic()

    def write(index: int, arrays: dict[str, np.ndarray]) -> None:
        write_shard(shard_path(folder, index), arrays)
        done[index] = counts(arrays)

    def cut() -> None:
        """Drops what this run made beyond the tokens that were asked for: how much that is hangs on when it ended."""
        total = 0
        for index in itertools.takewhile(lambda index: index in done, own()):
            here, total = total, total + done[index]["tokens"]
            if index in touched and total >= mine:
                arrays = read_shard(shard_path(folder, index))
                lengths = arrays["length"]
                beyond = here + np.cumsum(lengths) - lengths >= mine
                for name in ("tokens", "length", "prompt_length"):
                    arrays[name][beyond] = 0
                write(index, arrays)
                if beyond.all():
                    shard_path(folder, index).unlink()
                    del done[index]

    def describe() -> dict[str, Any]:
        check_recipe(folder, recipe)  # of others, too, which may be filling it
        look(folder, done, options.shard_size)
        described = manifest(recipe, done, options.tokens)
        write_manifest(folder, described)
        return described

    # Before the first shard: whoever ends here, or begins beside this one, is not to mix two recipes.
    if (described := describe())["tokens"] >= options.tokens:
        return described
    lacking = (index for index in own() if not whole(index))
    with contextlib.closing(ahead(lambda index: (index, openings(llm, options, index)), lacking)) as fresh:
        rows = missing()
        try:
            refill()
            with token_progress("writing", mine, passed, enabled=progress) as report:
                while settle() < mine:
                    for request in engine.step():
                        if request.finish_reason is not None:
                            ended(request)
                    report(num_tokens())
                    if time.monotonic() - saved > SAVE_EVERY:
                        save()
                    refill()
        finally:
            for request in running:  # after an interrupt, or beyond what was asked for
                engine.abort(request)
            save()
    cut()
    return describe()


def kept(folder: Path) -> str:
    """What an interrupt leaves of `generate`, and how to go on, in words."""
    done: dict[int, Counter[str]] = {}
    look(folder, done)
    total = sum(done.values(), Counter())
    if not total["sequences"]:
        return f"no sequence was finished, nothing is kept in {folder}"
    held = f"{total['sequences']:,} sequences with {total['tokens']:,} tokens"
    return f"{held} are kept in {folder}: the same command goes on from there"


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


def look(folder: Path, done: dict[int, Counter[str]], size: int = 0) -> None:
    """Finds what the shards on disk hold, as far as that may be more than `done` has: those of earlier runs, and of
    other parts. size: sequences of a whole one."""
    for index in sorted(int(path.stem.removeprefix("shard-")) for path in folder.glob(SHARDS)):
        if index not in done or done[index]["sequences"] < size:
            done[index] = counts(read_shard(shard_path(folder, index)))


def counts(arrays: dict[str, np.ndarray]) -> Counter[str]:
    """Of what a shard holds."""
    there = arrays["length"] > 0
    names = (CATEGORIES[i] for i in arrays["category"][there])
    tokens, given = int(arrays["length"].sum()), int(arrays["prompt_length"].sum())
    return Counter({"sequences": int(there.sum()), "tokens": tokens, "prompt_tokens": given}) + Counter(names)


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
