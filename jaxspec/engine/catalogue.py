"""The catalogue of device programs, which chooses the program that runs each batch.

An engine that warms up (compiles in advance) has few programs, all known at its start. A batch runs on the smallest
program that serves it. Any other engine compiles a program that fits the batch exactly when such a batch first comes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from jaxspec.decode.state import Variant
from jaxspec.engine.batch import NEVER, ChunkShape, power_of_two
from jaxspec.options.sampling_params import MAX_LOGPROBS
from jaxspec.runtime.programs import Variants
from jaxspec.verify import rules

Passes = Literal["prefill", "catch_up"]
Shape = tuple[int, int]  # (B, N): the number of rows of a launch, and the width of its block table in pages
# The largest row count of programs is max_num_seqs, rounded up to a power of two. The smaller row counts are 1/4 of it,
# 1/16, ... until one of these is at most FEWEST_ROWS, and 1.
FEWEST_ROWS = 16
# For every AHEAD rows of max_num_seqs one more request is prefilled, to take the place of a row that ends, and another
# one is admitted, whose prompt is read while the host takes a launch's results in.
AHEAD = 8


def most_running(max_num_seqs: int) -> int:
    """Return the largest number of requests that hold pages at a time."""
    return max_num_seqs + 2 * (max_num_seqs // AHEAD)


@dataclasses.dataclass(frozen=True)
class Launch:
    """The description of a compiled program for launches. A launch is one run of the program, over many rounds.

    k: number of draft tokens a round.
    rows, row_pages: B and N, the number of rows and the width of the block table in pages.
    variant: code paths that the program is compiled with.
    """

    k: int
    rows: int
    row_pages: int
    variant: Variant

    def __str__(self) -> str:
        return f"launch, {self.rows} rows of {self.row_pages} pages, {self.k} drafts a round, {self.variant}"


@dataclasses.dataclass(frozen=True)
class Prefill:
    """The description of a compiled program for a pass over prompts.

    name: "prefill" for a pass of the target, "catch_up" for a pass of the draft.
    shape: shape of the token array.
    row_pages: N, the width of the block table in pages.
    variant: code paths that the program is compiled with.
    """

    name: Passes
    shape: ChunkShape
    row_pages: int
    variant: Variant

    def __str__(self) -> str:
        scores = "" if self.variant.logprobs is None else f", {self.variant.logprobs} log-probabilities"
        return f"{self.name}, {self.shape.least_rows} pieces of {self.shape.width} tokens{scores}"


class OpenCatalogue:
    """The catalogue of an engine that compiles a program when a batch first needs it.

    While requests are running, the number of rows B and the width of block tables N do not shrink if that would need a
    new program. A smaller program for the few rows left at the end would take more time to compile than it saves. If an
    earlier batch has compiled a smaller program that fits, that program is used.

    table_widths: possible values of N, in pages.
    made: programs that launches have used.
    spare: maps a launch's number of rows a round to its number of spare rows. It is 0 unless a round has max_num_seqs
      rows: in a smaller launch, every request that is ready has a row of its own.
    """

    def __init__(self, table_widths: Sequence[int], max_num_seqs: int) -> None:
        self.table_widths = tuple(table_widths)
        self.spare = Counter({max_num_seqs: max_num_seqs // AHEAD})
        self.variants = Variants()
        self.made = set[Launch]()
        self.grown = (1, 1)

    def idle(self) -> None:
        """Reset the shape (B, N) of the next launch, because no request is running."""
        self.grown = (1, 1)

    def shape(self, num_rows: int, num_pages: int) -> tuple[int, int]:
        """Return the shape (B, N) of a launch over num_rows rows, each of which holds at most num_pages pages."""
        pages = smallest_fit(self.table_widths, num_pages)
        self.grown = max(power_of_two(num_rows), self.grown[0]), max(pages, self.grown[1])
        return self.grown

    def launch(self, k: int, shape: Shape, exact: Variant, needed: Shape | None = None) -> Launch:
        """Return the launch program for a batch of shape (B, N) that needs exactly the code paths of variant `exact`.

        The program may have more code paths, if such a program is compiled and the batch's own variant is rare.

        needed: the number of rows, and of pages of a row, that the batch requires. If None, `shape` is used instead.
          Among the compiled programs with at least as many, the one with the fewest rows is chosen.
        """
        rows, row_pages = needed or shape
        grown = Launch(k, *shape, self.variants.choose((k, *shape), exact))
        fits = (p for p in self.smaller(grown) if p.rows >= rows and p.row_pages >= row_pages)
        chosen = min(fits, key=lambda p: (p.rows, p.row_pages), default=grown)
        self.made.add(chosen)
        return chosen

    def smaller(self, program: Launch) -> Iterator[Launch]:
        """Yield the programs of fewer rows that launches have used and that otherwise equal this one."""
        return (p for p in self.made if (p.k, p.variant) == (program.k, program.variant) and p.rows < program.rows)

    def most_ends(self, program: Launch, num_requests: int, active: int, *, others_wait: bool) -> int:
        """Return how many requests must end before a launch of this program returns to the host.

        If other requests are queued for a row, the number is a compromise: an ended row does nothing until it has a new
        request, but each return to the host takes time. If none are queued, the launch returns when the remaining
        requests fit a faster program, with fewer rows.

        num_requests: number of requests of the launch; active: number of those that its first round runs.
        others_wait: whether other requests are queued for a row.
        """
        if others_wait:
            return num_requests - active + -(-active // 16)
        fewer = max((p.rows for p in self.smaller(program)), default=0)
        return num_requests - fewer if FEWEST_ROWS <= fewer < num_requests else NEVER

    def pass_rows(self, shape: ChunkShape) -> tuple[int, ...]:
        """Return the numbers of rows to which a pass may be limited, in ascending order.

        They are few, because each may have to be compiled while requests wait: all rows, 1/4 of them, 1/16, ...
        """
        quarters = (shape.rows // 4**i for i in reversed(range(shape.rows.bit_length())))
        return tuple(rows for rows in quarters if rows >= shape.sizes[0])

    def prefill(self, name: Passes, shape: ChunkShape, row_pages: int, exact: Variant) -> Prefill:
        """Return the program for a pass over prompts that needs exactly the code paths of this variant."""
        return Prefill(name, shape, row_pages, exact)


class ClosedCatalogue(OpenCatalogue):
    """The catalogue of an engine that compiles all its programs in advance.

    The programs are `launches`, `prefills` and `others`, which copy pages and write grammars' tables. Launch programs
    for 16 rows, if there are any, exist for each width of the block table if they are greedy or sampled; all others for
    the widest table only.

    made: programs that are compiled. While the smallest program that serves a batch is not among them, a larger
      compiled one with the same number of draft tokens is used, if there is one.
    ks: values of K, the number of draft tokens a round.
    rule: name of the acceptance rule in the engine's options; None if the options name none.
    max_num_seqs: maximum number of rows.
    table_widths: widths N of block tables, in pages.
    chunk: shape of the token array of a pass over prompts.
    catches_up: whether there is a draft model that reads prompts.
    grammars: whether requests may have grammars.
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
        grammars: bool = False,
    ) -> None:
        super().__init__(table_widths, max_num_seqs)
        self.rows = row_counts(max_num_seqs)
        self.others = ("copy_pages", "write_grammar") if grammars else ("copy_pages",)
        self.launches = tuple(launches(sorted(ks), self.rows, self.table_widths, rule, grammars=grammars))
        self.prefills = tuple(prefills(chunk, self.table_widths[-1], catches_up=catches_up))

    def shape(self, num_rows: int, num_pages: int) -> tuple[int, int]:
        return smallest_fit(self.rows, num_rows), smallest_fit(self.table_widths, num_pages)

    def launch(self, k: int, shape: Shape, exact: Variant, needed: Shape | None = None) -> Launch:
        rows, row_pages = shape
        large_enough = (p for p in self.launches if p.rows >= rows and p.row_pages >= row_pages and p.k >= k)
        smallest, *wider = (p for p in large_enough if p.variant.covers(exact))
        chosen = smallest
        if smallest not in self.made:
            chosen = next((p for p in wider if p in self.made and p.k == smallest.k), smallest)
        self.made.add(chosen)
        return chosen

    def pass_rows(self, shape: ChunkShape) -> tuple[int, ...]:
        return shape.sizes

    def prefill(self, name: Passes, shape: ChunkShape, row_pages: int, exact: Variant) -> Prefill:
        return next(p for p in self.prefills if p.name == name and p.variant.covers(exact))


def smallest_fit(sizes: Sequence[int], wanted: int) -> int:
    """Return the smallest size that is at least `wanted`. sizes: in ascending order."""
    return next(size for size in sizes if size >= wanted)


def row_counts(most: int) -> tuple[int, ...]:
    """Return the possible numbers of rows B of a launch, in ascending order.

    The largest is `most`, rounded up to a power of two. The others are 1/4 of it, 1/16, ... until one of these is at
    most FEWEST_ROWS, and 1.
    """
    counts = [power_of_two(most)]
    while counts[-1] > FEWEST_ROWS or (len(counts) == 1 and counts[-1] >= 4):
        counts.append(counts[-1] // 4)
    return tuple(sorted({1, *counts}))


def variants(rule: str | None) -> tuple[Variant, Variant, Variant]:
    """Return three variants (code paths of a program): greedy, sampled, and all that a request may ask for.

    rule: name of the acceptance rule in the engine's options; None if the options name none.
    """

    def rules_of(*, greedy: bool) -> set[str]:
        return {rules.of_request(rule, greedy=greedy, seeded=seeded) for seeded in (False, True)} - {rules.GREEDY}

    greedy = Variant(frozenset(rules_of(greedy=True)))
    sampled = Variant(frozenset(rules_of(greedy=True) | rules_of(greedy=False)), filters=True)
    everything = dataclasses.replace(sampled, logprobs=MAX_LOGPROBS, processors=True, long_lists=True)
    return greedy, sampled, everything


def launches(
    ks: Sequence[int], row_counts: Sequence[int], table_widths: Sequence[int], rule: str | None, *, grammars: bool
) -> Iterator[Launch]:
    """Yield the programs of launches. Of programs that serve the same batch, the smallest comes first.

    grammars: whether requests may have grammars. Only programs of two variants of their own read grammars' tables, so
      that no other batch pays for them.

    The programs are sorted by variant, and the last variant takes longest to compile. A warm-up therefore compiles them
    from the last to the first.
    """
    greedy, sampled, everything = variants(rule)
    few_ks = sorted({ks[0], ks[-1]})  # batches seldom need the other variants, so they have few values of K
    widest = table_widths[-1:]
    wanted = [(greedy, ks, table_widths), (sampled, ks, table_widths), (everything, few_ks, widest)]
    if grammars:
        wanted.insert(2, (dataclasses.replace(sampled, grammars=True), few_ks, widest))
        wanted.append((dataclasses.replace(everything, grammars=True), ks[-1:], widest))
    for variant, own_ks, own_widths in wanted:
        for rows in row_counts:
            # A narrow block table does not speed up fewer than FEWEST_ROWS rows. A batch of more rows usually has a
            # long row, which needs the widest table.
            widths = own_widths if rows == FEWEST_ROWS else widest
            yield from (Launch(k, rows, row_pages, variant) for k in own_ks for row_pages in widths)


def prefills(chunk: ChunkShape, row_pages: int, *, catches_up: bool) -> Iterator[Prefill]:
    """Yield the programs of passes over prompts: for the target, and if `catches_up` for the draft.

    chunk: largest shape of a pass.
    row_pages: N, the width of the block table in pages.
    """
    shapes = [dataclasses.replace(chunk, least_rows=rows) for rows in chunk.sizes]
    full = dataclasses.replace(chunk, least_rows=chunk.rows)
    yield from (Prefill("prefill", shape, row_pages, Variant()) for shape in shapes)
    yield Prefill("prefill", full, row_pages, Variant(logprobs=MAX_LOGPROBS))
    if catches_up:
        yield from (Prefill("catch_up", shape, row_pages, Variant()) for shape in shapes)
