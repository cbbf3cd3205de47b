"""Generating training data with the target: thousands of sequences at once, saved to disk every few seconds."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import checkpoints
from jaxspec.common.progress import token_progress
from jaxspec.engine.request import Request
from jaxspec.train.ahead import ahead
from jaxspec.train.data import (
    check_recipe,
    counts,
    id_dtype,
    new_manifest,
    read_shard,
    shard_path,
    update_counts,
    write_manifest,
    write_shard,
)
from jaxspec.train.data_options import DataOptions
from jaxspec.train.openings import Opening, openings, with_message

if TYPE_CHECKING:
    from jaxspec.api.llm import LLM

REFILL = 8  # new requests fill free rows of the batch in multiples of an eighth of all rows
SAVE_EVERY = 10.0  # least number of seconds between two writes to disk


class Shard:
    """A shard (a file of sequences) that is being written.

    openings: first tokens and sampling parameters of each sequence.
    arrays: contents of the file; see `jaxspec.train.data`.
    changed: whether the arrays hold more than the file.
    """

    def __init__(self, openings: list[Opening], length: int, vocab_size: int) -> None:
        self.openings = openings
        self.changed = False
        count = len(openings)
        self.arrays = {
            "tokens": np.zeros((count, length), id_dtype(vocab_size)),
            "length": np.zeros(count, np.int32),
            "prompt_length": np.zeros(count, np.int32),
            "category": np.array([opening.category for opening in openings], np.uint8),
            "temperature": np.array([opening.temperature for opening in openings], np.float32),
        }

    def take(self, row: int, request: Request) -> None:
        """Store the sequence of a finished request as number `row` of the shard."""
        self.arrays["tokens"][row, : request.num_tokens] = request.tokens
        self.arrays["length"][row] = request.num_tokens
        self.arrays["prompt_length"][row] = len(request.prompt)
        self.changed = True


def generate(
    llm: LLM, out: str | Path, options: DataOptions, *, target: str = "", progress: bool = True
) -> dict[str, Any]:
    """Write this process's part of options.tokens tokens to the folder `out`, and return the folder's manifest.

    Sequences that are already in the folder are kept.

    llm: the target, made with `engine_options`. target: the target's name, for the manifest.

    On one kind of device with one version of JAX the data are the same, however often the run was stopped and resumed.
    Elsewhere, or with other `rows`, matrix products round differently. A sequence may then differ from a token on at
    which two candidates were almost equally probable.

    Raises: UserError if the folder holds data of another recipe (target and options of the data); RuntimeError if the
      engine failed.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(llm, folder, options, target)
    # The manifest is written before the first shard, so that other runs find the recipe of every shard on disk.
    described = run.describe()
    if described["tokens"] >= options.tokens:
        return described
    run.write_sequences(progress)
    run.drop_surplus()
    return run.describe()


class Run:
    """The generation of this process's part of the data.

    enough: number of tokens that this part must have.
    done: counts of the shards on disk, by the shard's index.
    under_way: shards that are not complete on disk, by index.
    touched: indices of the shards that this run writes to.
    waiting: (shard, row) of the sequences to be started next. A row is a sequence's index in its shard.
    running: (shard, row) of each request in the engine.
    unsettled: the sequences in order, from the first that is not written on, each as (lengths of its shard, row). A
      shard that was complete on disk counts as one sequence.
    settled: number of tokens in the sequences before those.
    num_tokens, num_sequences: numbers of tokens and sequences that are written, among the sequences that this run found
      on disk or started.
    saved: time of time.monotonic at which the shards were last saved.
    """

    def __init__(self, llm: LLM, folder: Path, options: DataOptions, target: str) -> None:
        self.llm, self.engine = llm, llm.engine
        self.folder = folder
        self.options = options
        made_by = {"target": target, "tokenizer": checkpoints.fingerprint(llm.tokenizer)}
        self.recipe = {**made_by, "vocab_size": self.engine.limits.vocab_size, **options.recipe}
        self.enough = -(-options.tokens // options.part[1])
        self.done: dict[int, Counter[str]] = {}
        self.under_way: dict[int, Shard] = {}
        self.touched: set[int] = set()
        self.waiting: deque[tuple[Shard, int]] = deque()
        self.running: dict[Request, tuple[Shard, int]] = {}
        self.unsettled: deque[tuple[np.ndarray, int]] = deque()
        self.settled = 0
        self.num_tokens = 0
        self.num_sequences = 0
        self.saved = time.monotonic()

    def write_sequences(self, progress: bool) -> None:
        """Generate until this part has enough tokens. Save the finished sequences, also after an interrupt."""
        incomplete = (index for index in self.own_shards() if not self.complete(index))
        with contextlib.closing(ahead(self.shard_openings, incomplete)) as fresh:
            missing = self.missing(fresh)
            try:
                self.refill(missing)
                with token_progress("writing", self.enough, self.num_tokens, enabled=progress) as report:
                    while self.settle() < self.enough:
                        for request in self.engine.step():
                            if request.finish_reason is not None:
                                self.ended(request)
                        report(self.num_started_tokens())
                        if time.monotonic() - self.saved > SAVE_EVERY:
                            self.save()
                        self.refill(missing)
            finally:
                for request in self.running:  # requests of an interrupted run, or beyond the tokens that were asked for
                    self.engine.abort(request)
                self.save()

    def own_shards(self) -> Iterator[int]:
        """Yield the indices of the shards that this process writes, without end."""
        return filter(self.options.takes, itertools.count())

    def complete(self, index: int) -> bool:
        """Return whether a shard on disk has all its sequences."""
        return index in self.done and self.done[index]["sequences"] == self.options.shard_size

    def shard_openings(self, index: int) -> tuple[int, list[Opening]]:
        return index, openings(self.llm, self.options, index)

    def missing(self, fresh: Iterator[tuple[int, list[Opening]]]) -> Iterator[tuple[Shard, int] | None]:
        """Yield (shard, row) of each sequence that is not written, in order. Yield None where written ones are skipped.

        fresh: index and openings (first tokens of the sequences) of each incomplete shard.
        """
        last = -1
        for index, begun in fresh:
            for i in filter(self.options.takes, range(last + 1, index)):
                self.num_tokens += self.done[i]["tokens"]
                self.num_sequences += self.done[i]["sequences"]
                self.unsettled.append((np.array([self.done[i]["tokens"]]), 0))
            yield None
            shard = Shard(begun, self.options.length, self.engine.limits.vocab_size)
            last = index
            if index in self.done:
                shard.arrays = read_shard(shard_path(self.folder, index))
            self.under_way[index] = shard
            self.touched.add(index)
            for row, length in enumerate(shard.arrays["length"].tolist()):
                self.num_tokens += length
                self.num_sequences += length > 0
                self.unsettled.append((shard.arrays["length"], row))
                yield None if length else (shard, row)

    def settle(self) -> int:
        """Return the number of tokens in the sequences before the first one that is not written."""
        while self.unsettled:
            lengths, row = self.unsettled[0]
            if not lengths[row]:
                break
            self.settled += int(lengths[row])
            self.unsettled.popleft()
        return self.settled

    def num_started_tokens(self, least: int = 0) -> int:
        """Return the number of tokens of all written and running sequences. A running one counts at least `least`."""
        return self.num_tokens + sum(max(request.num_tokens, least) for request in self.running)

    def refill(self, missing: Iterator[tuple[Shard, int] | None]) -> None:
        """Start requests in free rows of the batch: in one, two or four eighths of all rows, or in all if none runs.

        A request writes a user's message or an answer. New requests interrupt the running ones, and every other number
        of new requests would compile another program.

        missing: the result of the method `missing`.
        """
        at_once = self.engine.config.max_num_seqs
        eighth = max(at_once // REFILL, 1)
        free = (at_once - len(self.running)) // eighth
        if not free:
            return
        usual = self.num_tokens // self.num_sequences if self.num_sequences else self.options.length // 2
        enough = self.num_started_tokens(usual) >= self.enough
        count = eighth << (free.bit_length() - 1) if self.running else at_once
        for _ in range(count):
            while not self.waiting:
                if enough:
                    return
                found = next(missing)
                if found is None:
                    enough = self.num_started_tokens() >= self.enough
                else:
                    self.waiting.append(found)
            shard, row = self.waiting.popleft()
            opening = shard.openings[row]
            params = opening.params(self.options.length)
            request = self.engine.add(opening.ids, params, stop_ids=self.llm.stop_ids)
            self.running[request] = shard, row

    def ended(self, request: Request) -> None:
        """Process a finished request. After a user's message, its answer or another attempt at it is started next."""
        if request.finish_reason == "error":
            raise RuntimeError(f"generation failed: {request.error}; if memory is short, lower --rows")
        shard, row = self.running.pop(request)
        if shard.openings[row].attempt:
            shard.openings[row] = with_message(self.llm, shard.openings[row], request)
            self.waiting.appendleft((shard, row))
            return
        shard.take(row, request)
        self.num_tokens += request.num_tokens
        self.num_sequences += 1

    def save(self) -> None:
        """Write the finished sequences and the manifest.

        A shard without finished sequences is written too, because the manifest counts shards only up to the first
        missing one.
        """
        for index, shard in list(self.under_way.items()):
            if shard.changed or index not in self.done:
                self.write(index, shard.arrays)
                shard.changed = False
            if self.complete(index):
                del self.under_way[index]
        self.describe()
        self.saved = time.monotonic()

    def write(self, index: int, arrays: dict[str, np.ndarray]) -> None:
        write_shard(shard_path(self.folder, index), arrays)
        self.done[index] = counts(arrays)

    def drop_surplus(self) -> None:
        """Delete the sequences that this run wrote beyond the tokens asked for. Their number depends on timing."""
        total = 0
        for index in itertools.takewhile(lambda index: index in self.done, self.own_shards()):
            before = total
            total += self.done[index]["tokens"]
            if index in self.touched and total >= self.enough:
                arrays = read_shard(shard_path(self.folder, index))
                lengths = arrays["length"]
                beyond = before + np.cumsum(lengths) - lengths >= self.enough
                for name in ("tokens", "length", "prompt_length"):
                    arrays[name][beyond] = 0
                self.write(index, arrays)
                if beyond.all():
                    shard_path(self.folder, index).unlink()
                    del self.done[index]

    def describe(self) -> dict[str, Any]:
        """Write the manifest and return it. Raises: UserError if the folder holds data made with other options."""
        check_recipe(self.folder, self.recipe)
        update_counts(self.folder, self.done, self.options.shard_size)  # other processes may have added shards
        described = new_manifest(self.recipe, self.done, self.options.tokens)
        write_manifest(self.folder, described)
        return described


def kept(folder: Path) -> str:
    """Return a message that says what an interrupted `generate` has saved, and how to go on."""
    done: dict[int, Counter[str]] = {}
    update_counts(folder, done)
    total = sum(done.values(), Counter())
    if not total["sequences"]:
        return f"no sequence was finished, and {folder} holds none"
    held = f"{total['sequences']:,} sequences with {total['tokens']:,} tokens"
    return f"{held} are saved in {folder}: the same command continues from there"
