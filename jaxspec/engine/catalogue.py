"""Which program serves a batch.

An engine that warms up has few programs, all known at its start, and takes the smallest that serves. Any other compiles
a batch's own when it first comes, and has it from then on.
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
FEWEST_ROWS = 16  # of the launches that are warmed up, but for a single row's, and where there are no more


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch's program.

    k: drafts a round; rows, row_pages: B, N.
    """

    k: int
    rows: int
    row_pages: int
    variant: Variant

    def __str__(self) -> str:
        return f"launch, {self.rows} rows of {self.row_pages} pages, {self.k} drafts a round, {self.variant}"


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A pass over prompts: `prefill`, or `catch_up`, by which the draft reads them."""

    name: Passes
    shape: ChunkShape
    row_pages: int
    variant: Variant

    def __str__(self) -> str:
        scores = "" if self.variant.logprobs is None else f", {self.variant.logprobs} log-probabilities"
        return f"{self.name}, {self.shape.least_rows} pieces of {self.shape.width} tokens{scores}"


class Open:
    """Of an engine that compiles what a batch wants.

    table_widths: N. Both B and N only grow while requests are running: a smaller shape, for the few rows that are left
    at the end, would cost more to compile than it saves.
    """

    def __init__(self, table_widths: Sequence[int]) -> None:
        self.table_widths, self.variants, self.grown = tuple(table_widths), Variants(), (1, 1)

    def idle(self) -> None:
        """Nothing runs."""
        self.grown = (1, 1)

    def shape(self, num_rows: int, num_pages: int) -> tuple[int, int]:
        """(B, N) of a launch over so many rows, none of which comes to hold more pages."""
        pages = next(width for width in self.table_widths if width >= num_pages)
        self.grown = max(power_of_two(num_rows), self.grown[0]), max(pages, self.grown[1])
        return self.grown

    def launch(self, k: int, shape: tuple[int, int], exact: Variant) -> Launch:
        """The program for a batch that wants these."""
        return Launch(k, *shape, self.variants.choose((k, *shape), exact))

    def prefill(self, name: Passes, shape: ChunkShape, row_pages: int, exact: Variant) -> Prefill:
        """The program of a pass over prompts."""
        return Prefill(name, shape, row_pages, exact)


class Closed(Open):
    """Of an engine that warms up: `launches` and `prefills` are all there are, and a page copy. The widest block table
    serves all; a batch of 16 has a narrow one, too.

    made: launches that are compiled. While the smallest that serves is not, a wider one of as many drafts is taken.

    ks: K, each that there is; rule: the acceptance rule asked for, or None; table_widths: N; chunk: the shape of a pass
    over prompts; catches_up: whether there is a draft that reads them.
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
        self.rows, self.made = row_counts(max_num_seqs), set[Launch]()
        self.launches = tuple(launches(sorted(ks), self.rows, self.table_widths, rule))
        self.prefills = tuple(prefills(chunk, self.table_widths[-1], catches_up=catches_up))

    def shape(self, num_rows: int, num_pages: int) -> tuple[int, int]:
        fits = lambda sizes, wanted: next(size for size in sizes if size >= wanted)
        return fits(self.rows, num_rows), fits(self.table_widths, num_pages)

    def launch(self, k: int, shape: tuple[int, int], exact: Variant) -> Launch:
        serves = (p for p in self.launches if p.rows >= shape[0] and p.row_pages >= shape[1] and p.k >= k)
        smallest, *wider = (p for p in serves if p.variant.covers(exact))
        made = (p for p in wider if p in self.made and p.k == smallest.k)
        found = smallest if smallest in self.made else next(made, smallest)
        self.made.add(found)
        return found

    def prefill(self, name: Passes, shape: ChunkShape, row_pages: int, exact: Variant) -> Prefill:
        return next(p for p in self.prefills if p.name == name and p.variant.covers(exact))


def row_counts(most: int) -> tuple[int, ...]:
    """B: the power of two with room for all rows, its quarters, and one."""
    counts = [power_of_two(most)]
    while counts[-1] > FEWEST_ROWS or (len(counts) == 1 and counts[-1] >= 4):
        counts.append(counts[-1] // 4)
    return tuple(sorted({1, *counts}))


def variants(rule: str | None) -> tuple[Variant, Variant, Variant]:
    """Greedy, sampled, and with all that a request may ask for."""
    asked = lambda greedy: {rules.of_request(rule, greedy=greedy, seeded=seeded) for seeded in (False, True)}
    greedy, every = ({*asked(True), *also} - {rules.GREEDY} for also in ((), asked(False)))
    sampled = Variant(frozenset(every), filters=True)
    whole = dataclasses.replace(sampled, logprobs=MAX_LOGPROBS, processors=True, long_lists=True)
    return Variant(frozenset(greedy)), sampled, whole


def launches(
    ks: Sequence[int], row_counts: Sequence[int], table_widths: Sequence[int], rule: str | None
) -> Iterator[Launch]:
    """The smallest first, where several serve. Of one variant after the other, the last of which the compiler takes
    longest for: a warm-up goes from the last to the first."""
    greedy, sampled, whole = variants(rule)
    few, wide = sorted({ks[0], ks[-1]}), table_widths[-1:]  # of what is seldom asked for
    for variant, counts, every in ((greedy, ks, table_widths), (sampled, ks, table_widths), (whole, few, wide)):
        for rows in row_counts:
            widths = every if rows == FEWEST_ROWS else wide  # fewer gain nothing by another; of many one is long
            yield from (Launch(k, rows, row_pages, variant) for k in counts for row_pages in widths)


def prefills(chunk: ChunkShape, row_pages: int, *, catches_up: bool) -> Iterator[Prefill]:
    of = lambda rows: dataclasses.replace(chunk, least_rows=rows)
    full, sizes = of(chunk.rows), sorted({chunk.padded(count) for count in range(1, chunk.rows + 1)})
    yield from (Prefill("prefill", of(rows), row_pages, Variant()) for rows in sizes)
    yield Prefill("prefill", full, row_pages, Variant(logprobs=MAX_LOGPROBS))
    if catches_up:
        yield from (Prefill("catch_up", of(rows), row_pages, Variant()) for rows in sizes)
