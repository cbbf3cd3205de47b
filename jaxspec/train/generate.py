"""Training data from the target: thousands of rows at once through the engine, shards on disk as they are complete."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxspec.cache.pages import default_page_size
from jaxspec.config import at_least
from jaxspec.engine.batch import power_of_two
from jaxspec.engine.request import Request
from jaxspec.options import options
from jaxspec.progress import token_progress
from jaxspec.sampling_params import SamplingParams
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
from jaxspec.train.openings import Opening, openings, with_message
from jaxspec.train.prompts import CATEGORIES

if TYPE_CHECKING:
    from jaxspec.llm import LLM

# Shares are relative. Half of it greedy: a draft is mostly asked for the target's likeliest token.
MIXTURE = {
    "chat": 0.25,
    "story": 0.16,
    "code": 0.17,
    "summary": 0.13,
    "rewrite": 0.1,
    "list": 0.06,
    "translate": 0.03,
    "free": 0.1,
    # No grammar is as wide as what the target itself has seen. Of its own accord it hardly ever asks for code, and
    # rarely for a plain fact.
    "self": 1.0,
    "begun": 2.0,
}
# At 1 a small target often loses its thread, and what follows teaches little of what it is used for.
TEMPERATURES = {0.0: 0.5, 0.7: 0.4, 1.0: 0.1}
ROWS = {"cpu": 16, "gpu": 2048, "tpu": 512}
REFILL = 8  # eighths of the rows are filled again at a time


@options
class DataOptions:
    """What is generated.

    Args:
      tokens: at least so many, prompts included.
      seed: of prompts and samples. Sequence i of shard s depends on (seed, s, i) alone.
      length: longest sequence, prompt included, in tokens. A prompt takes at most half of it, a message that the
        target writes at most a quarter.
      shard_size: sequences of a shard.
      mixture: category (prompts.CATEGORIES) -> its share; temperatures: temperature -> its share. 0 is greedy.
      rows: sequences decoded together; changes the speed, not the data, but for rounding.
      part: (i, n) is the i-th of n processes, one a device say, that fill the folder together: every n-th shard, and
        that share of the tokens.
    """

    tokens: int
    seed: int = 0
    length: int = 512
    shard_size: int = 4096
    mixture: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(MIXTURE))
    temperatures: Mapping[float, float] = dataclasses.field(default_factory=lambda: dict(TEMPERATURES))
    rows: int | None = None
    part: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if not 1 <= self.part[0] <= self.part[1]:
            raise ValueError(f"part {self.part[0]}/{self.part[1]}: give i/n with i in 1..n")
        for name, least in {"tokens": 1, "seed": 0, "length": 16, "shard_size": 1}.items():
            at_least(name, getattr(self, name), least)
        if self.rows is not None:
            at_least("rows", self.rows, 1)
        if unknown := self.mixture.keys() - set(CATEGORIES):
            raise ValueError(f"mixture has no category {min(unknown)!r}: choose among {', '.join(CATEGORIES)}")
        for name in ("mixture", "temperatures"):
            shares = getattr(self, name)
            if not shares or min(shares.values()) < 0 or not sum(shares.values()) > 0:
                raise ValueError(f"{name}={dict(shares)}: shares must not be negative, and one must be positive")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # refuses what is none

    @property
    def num_rows(self) -> int:
        return self.rows or ROWS.get(jax.default_backend(), ROWS["gpu"])

    def takes(self, shard: int) -> bool:
        """Whether the shard of this number is this part's."""
        return shard % self.part[1] == self.part[0] - 1

    @property
    def recipe(self) -> dict[str, Any]:
        """What the sequences depend on, as the manifest has it."""
        return {
            "seed": self.seed,
            "length": self.length,
            "shard_size": self.shard_size,
            "mixture": dict(self.mixture),
            "temperatures": {f"{temperature:g}": share for temperature, share in self.temperatures.items()},
        }


def shares(name: str, text: str, kind: Callable[[str], Any] = str) -> dict[Any, float]:
    """An option such as "chat:2,code:1" as {"chat": 2.0, "code": 1.0}. Raises ValueError with the option's name."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        found = {kind(key.strip()): float(share) for key, share in pairs}
        if len(found) < len(pairs) or not all(map(math.isfinite, found.values())):
            raise ValueError
        return found
    except ValueError:
        raise ValueError(f"{name} {text!r}: give values, each once, with their shares, such as a:2,b:1") from None


def part_of(text: str) -> tuple[int, int]:
    """ "2/4" -> (2, 4). Raises ValueError."""
    try:
        i, n = map(int, text.split("/"))
    except ValueError:
        raise ValueError(f"--part {text}: give i/n, such as 2/4 for the second of four") from None
    return i, n


def engine_options(options: DataOptions) -> dict[str, Any]:
    """Of an LLM that generates: pages for all rows, so that nobody waits or is put back, and prompts in one pass."""
    rows, page_size = options.num_rows, default_page_size(jax.default_backend())
    return {
        "max_model_len": options.length,
        "max_num_seqs": rows,
        "page_size": page_size,
        "num_pages": rows * -(-options.length // page_size),
        "enable_prefix_caching": False,
        "prefill_chunk": max(power_of_two(options.length) * power_of_two(rows) // 2, 16),
    }


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

    Raises: ValueError where the folder holds data of another recipe; RuntimeError where the engine failed.
    """
    folder, engine = Path(out), llm.engine
    folder.mkdir(parents=True, exist_ok=True)
    recipe = {"target": target, "vocab_size": engine.limits.vocab_size, **options.recipe}
    check_recipe(folder, recipe)
    done: dict[int, Counter[str]] = {}
    look(folder, done)
    mine = -(-options.tokens // options.part[1])
    indices = (index for index in itertools.count() if options.takes(index) and index not in done)
    waiting: deque[tuple[Shard, int]] = deque()
    running: dict[Request, tuple[Shard, int]] = {}
    under_way: dict[int, Shard] = {}

    def num_tokens() -> int:
        ended = sum(count["tokens"] for index, count in done.items() if options.takes(index))
        return ended + sum(s.num_tokens for s in under_way.values()) + sum(r.num_tokens for r in running)

    def refill() -> None:
        """Starts messages and answers where rows are free: one, two or four eighths of the rows at a time, because
        newcomers interrupt the others and every other number would compile another program."""
        eighth = max(options.num_rows // REFILL, 1)
        free = (options.num_rows - len(running)) // eighth
        if not free:
            return
        for _ in range(eighth << (free.bit_length() - 1) if running else options.num_rows):
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
        look(folder, done)
        described = manifest(recipe, done, options.tokens)
        write_manifest(folder, described)
        return described

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
    if not (folder / MANIFEST).is_file():
        return
    there = read_manifest(folder)
    for name, wanted in recipe.items():
        if there.get(name) != wanted:
            raise ValueError(
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
