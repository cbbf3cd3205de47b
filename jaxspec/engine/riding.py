"""Prompts that ride along: their pieces are computed in the passes in which other rows decode, and a row whose prompt
is in the caches decodes from the next round of the same launch on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.cache.pages import CacheLayout
from jaxspec.drafters.base import Chunk
from jaxspec.engine.batch import ChunkShape, Piece, chunk_input, pieces
from jaxspec.engine.request import Request
from jaxspec.engine.results import Lag

MOST = 16  # rounds of such a launch


def ahead(max_num_seqs: int) -> int:
    """Requests beyond those with a row whose prompts are computed already, to take over where one ends."""
    return max_num_seqs // 8


@dataclasses.dataclass(frozen=True)
class Ride:
    """passes: the pieces that each round computes; ready: after how many rounds a request's prompt is in the caches;
    joining: those that decode before the launch ends; absent: the others, which have no row."""

    passes: list[list[Piece]]
    ready: dict[Request, int]
    joining: list[Request]
    absent: list[Request]


def plan(requests: Sequence[Request], shape: ChunkShape, num_rounds: int, room: int) -> Ride | None:
    """The next pieces of these requests, those of the first first, as many as so many rounds take; None where there is
    no pass of them. room: rows that are free. Where there are none nobody waits for a prompt, and passes are full."""
    most = dataclasses.replace(shape, rows=shape.rows * min(num_rounds, MOST))
    rows = pieces(requests, [request.target_len for request in requests], most)
    if not room:
        del rows[len(rows) // shape.rows * shape.rows :]
    if not rows:
        return None
    passes = [rows[at : at + shape.rows] for at in range(0, len(rows), shape.rows)]
    ends = {r: i + 1 for i, some in enumerate(passes) for r, start, n in some if start + n == r.num_tokens - 1}
    joining = [request for request, rounds in ends.items() if rounds < len(passes)][:room]
    absent = list(dict.fromkeys(r for r, *_ in rows if r not in joining))
    return Ride(passes, ends, joining, absent)


def inputs(
    ride: Ride,
    requests: Sequence[Request],
    layout: CacheLayout,
    shape: ChunkShape,
    row_pages: int,
    lag: Lag,
    *,
    drafted: bool,
) -> dict[str, Any]:
    """What the launch takes besides, as arguments of `launch_input`. requests: its rows; drafted: whether the draft
    reads the prompts too. A launch that drafts nothing leaves that out: where speculation does not pay, neither does
    that, and where it comes to, the draft catches up."""
    made = [chunk_input(rows, layout, shape, row_pages=row_pages) for rows in ride.passes]
    none = MOST - len(made)  # as many as there may ever be, so that there is one program
    fields = ("tokens", "start", "length", "block_table")
    stacked: Any = lambda arrays: np.concatenate(
        [np.stack(arrays), np.zeros((none, *arrays[0].shape), arrays[0].dtype)]
    )
    held = [lag.after(request, request.num_tokens - 1, drafted=drafted) for request in requests]
    return {
        "chunks": Chunk(**{name: stacked([getattr(chunk, name) for chunk in made]) for name in fields}),
        "ready": [ride.ready.get(request, 0) for request in requests],
        "draft_lens": [h if r in ride.ready else r.draft_len for r, h in zip(requests, held, strict=True)],
    }
