"""The catalogue of programs, which chooses the program for each batch.

An engine that warms up has few programs, all known at its start; the smallest that serves a batch is used. Any other
engine compiles a batch's own program when such a batch first comes, and keeps it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from jaxspec.decode.state import Variant
from jaxspec.engine.batch import ChunkShape, power_of_two
from jaxspec.options.sampling_params import MAX_LOGPROBS
from jaxspec.runtime.programs import Variants
from jaxspec.verify import rules

Passes = Literal["prefill", "catch_up"]
FEWEST_ROWS = 16  # the row counts to warm up are quartered until one is at most this


@dataclasses.dataclass(frozen=True)
class Launch:
    """The program of a launch.

    k: drafts a round.
    rows, row_pages: B, N.
    """

    k: int
    rows: int
    row_pages: int
    variant: Variant

    def __str__(self) -> str:
        return f"launch, {self.rows} rows of {self.row_pages} pages, {self.k} drafts a round, {self.variant}"


@dataclasses.dataclass(frozen=True)
class Prefill:
    """The program of a pass over prompts: `prefill` for the target, or `catch_up` for the draft."""

    name: Passes
    shape: ChunkShape
    row_pages: int
    variant: Variant

    def __str__(self) -> str:
        scores = "" if self.variant.logprobs is None else f", {self.variant.logprobs} log-probabilities"
        return f"{self.name}, {self.shape.least_rows} pieces of {self.shape.width} tokens{scores}"


class OpenCatalogue:
    """The catalogue of an engine that compiles what its batches need.

    table_widths: the widths N of block tables. Both B and N only grow while requests are running: a smaller program for
      the few rows left at the end would cost more to compile than it saves.
    """

    def __init__(self, table_widths: Sequence[int]) -> None:
        self.table_widths = tuple(table_widths)
        self.variants = Variants()
        self.grown = (1, 1)

    def idle(self) -> None:
        """Let the shape shrink again, because no request is running."""
        self.grown = (1, 1)

    def shape(self, num_rows: int, num_pages: int) -> tuple[int, int]:
        """Return (B, N) of a launch over num_rows rows, each of which holds at most num_pages pages."""
        pages = smallest_fit(self.table_widths, num_pages)
        self.grown = max(power_of_two(num_rows), self.grown[0]), max(pages, self.grown[1])
        return self.grown

    def launch(self, k: int, shape: tuple[int, int], exact: Variant) -> Launch:
        """Return the program for a batch that needs exactly this variant."""
        return Launch(k, *shape, self.variants.choose((k, *shape), exact))

    def prefill(self, name: Passes, shape: ChunkShape, row_pages: int, exact: Variant) -> Prefill:
        """Return the program of a pass over prompts that needs exactly this variant."""
        return Prefill(name, shape, row_pages, exact)


class ClosedCatalogue(OpenCatalogue):
    """The catalogue of an engine that warms up: all its programs are `launches`, `prefills` and a copy of pages. The
    widest block table serves all batches; a batch of 16 rows also has a narrow one.

    made: launches that are compiled. While the smallest launch that serves a batch is not among them, a wider one with
      the same number of drafts is used.
    ks: the values of K.
    rule: the acceptance rule asked for, or None.
    table_widths: the widths N of block tables.
    chunk: the shape of a pass over prompts.
    catches_up: whether there is a draft that reads prompts.
    """

    def __init__(
        self,
        ks: Sequence[int],
        rule: str | None,
        *,
        max_num_seqs: int,
        table_widths: Sequence[int],
        chunk: ChunkShape,
        catches_up: bool,
    ) -> None:
        super().__init__(table_widths)
        self.rows = row_counts(max_num_seqs)
        self.made = set[Launch]()
        self.launches = tuple(launches(sorted(ks), self.rows, self.table_widths, rule))
        self.prefills = tuple(prefills(chunk, self.table_widths[-1], catches_up=catches_up))

    def shape(self, num_rows: int, num_pages: int) -> tuple[int, int]:
        return smallest_fit(self.rows, num_rows), smallest_fit(self.table_widths, num_pages)

    def launch(self, k: int, shape: tuple[int, int], exact: Variant) -> Launch:
        rows, row_pages = shape
        large_enough = (p for p in self.launches if p.rows >= rows and p.row_pages >= row_pages and p.k >= k)
        smallest, *wider = (p for p in large_enough if p.variant.covers(exact))
        chosen = smallest
        if smallest not in self.made:
            chosen = next((p for p in wider if p in self.made and p.k == smallest.k), smallest)
        self.made.add(chosen)
        return chosen

    def prefill(self, name: Passes, shape: ChunkShape, row_pages: int, exact: Variant) -> Prefill:
        return next(p for p in self.prefills if p.name == name and p.variant.covers(exact))


def smallest_fit(sizes: Sequence[int], wanted: int) -> int:
    """Return the first of the ascending sizes that is at least `wanted`."""
    return next(size for size in sizes if size >= wanted)


def row_counts(most: int) -> tuple[int, ...]:
    """Return the values of B: the power of two with room for all rows, its quarters, and 1."""
    counts = [power_of_two(most)]
    while counts[-1] > FEWEST_ROWS or (len(counts) == 1 and counts[-1] >= 4):
        counts.append(counts[-1] // 4)
    return tuple(sorted({1, *counts}))


def variants(rule: str | None) -> tuple[Variant, Variant, Variant]:
    """Return three variants: greedy, sampled, and one with everything that a request may ask for."""

    def rules_of(*, greedy: bool) -> set[str]:
        return {rules.of_request(rule, greedy=greedy, seeded=seeded) for seeded in (False, True)} - {rules.GREEDY}

    greedy = Variant(frozenset(rules_of(greedy=True)))
    sampled = Variant(frozenset(rules_of(greedy=True) | rules_of(greedy=False)), filters=True)
    everything = dataclasses.replace(sampled, logprobs=MAX_LOGPROBS, processors=True, long_lists=True)
    return greedy, sampled, everything


def launches(
    ks: Sequence[int], row_counts: Sequence[int], table_widths: Sequence[int], rule: str | None
) -> Iterator[Launch]:
    """Yield the programs of launches, the smallest first among those that serve the same batch. The variants follow one
    another, and the last takes longest to compile: a warm-up goes from the last program to the first."""
    greedy, sampled, everything = variants(rule)
    few_ks = sorted({ks[0], ks[-1]})  # the last variant is seldom needed
    widest = table_widths[-1:]
    for variant, own_ks, own_widths in (
        (greedy, ks, table_widths),
        (sampled, ks, table_widths),
        (everything, few_ks, widest),
    ):
        for rows in row_counts:
            # Fewer rows gain nothing by a narrow table, and among more rows one is long.
            widths = own_widths if rows == FEWEST_ROWS else widest
            yield from (Launch(k, rows, row_pages, variant) for k in own_ks for row_pages in widths)


def prefills(chunk: ChunkShape, row_pages: int, *, catches_up: bool) -> Iterator[Prefill]:
    """Yield the programs of passes over prompts."""
    sizes = sorted({chunk.padded(count) for count in range(1, chunk.rows + 1)})
    shapes = [dataclasses.replace(chunk, least_rows=rows) for rows in sizes]
    full = dataclasses.replace(chunk, least_rows=chunk.rows)
    yield from (Prefill("prefill", shape, row_pages, Variant()) for shape in shapes)
    yield Prefill("prefill", full, row_pages, Variant(logprobs=MAX_LOGPROBS))
    if catches_up:
        yield from (Prefill("catch_up", shape, row_pages, Variant()) for shape in shapes)
