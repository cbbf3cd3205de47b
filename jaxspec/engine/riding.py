"""Prompts that ride along: their pieces are computed in the passes in which other rows decode, and a row whose prompt
is in the caches decodes from the next round of the same launch on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.cache.pages import CacheLayout
from jaxspec.drafters.base import Chunk
from jaxspec.engine.batch import ChunkShape, Piece, chunk_input
from jaxspec.engine.request import Request
from jaxspec.engine.results import Lag

MOST = 16  # rounds of such a launch


@dataclasses.dataclass(frozen=True)
class Ride:
    """passes: the pieces that each round computes; ready: after how many rounds a request's prompt is in the caches."""

    passes: list[list[Piece]]
    ready: dict[Request, int]

    @property
    def joining(self) -> list[Request]:
        """Those that decode before the launch ends."""
        return [request for request, rounds in self.ready.items() if rounds < len(self.passes)]

    @property
    def absent(self) -> list[Request]:
        """The others, whose prompts are computed without their having a row."""
        return list({piece.request: None for rows in self.passes for piece in rows}.keys() - {*self.joining})


def plan(requests: Sequence[Request], shape: ChunkShape, num_rounds: int) -> Ride:
    """The next pieces of these requests, those of the first first, as many as so many rounds take."""
    passes: list[list[Piece]] = [[]]
    ready: dict[Request, int] = {}
    for request in requests:
        end = request.num_tokens - 1
        for at in range(request.target_len, end, shape.width):
            if len(passes[-1]) == shape.rows:
                if len(passes) == min(num_rounds, MOST):
                    return Ride(passes, ready)
                passes.append([])
            passes[-1].append(Piece(request, at, min(shape.width, end - at)))
        ready[request] = len(passes)
    return Ride(passes, ready)


def inputs(
    ride: Ride, requests: Sequence[Request], layout: CacheLayout, shape: ChunkShape, row_pages: int, lag: Lag
) -> dict[str, Any]:
    """What the launch takes besides, as arguments of `launch_input`. requests: its rows."""
    made = [chunk_input(rows, layout, shape, row_pages=row_pages) for rows in ride.passes]
    none = MOST - len(made)  # as many as there may ever be, so that there is one program
    fields = ("tokens", "start", "length", "block_table")
    stacked: Any = lambda arrays: np.concatenate([np.stack(arrays), np.zeros((none, *arrays[0].shape), arrays[0].dtype)])
    ends = [request.num_tokens - 1 for request in requests]
    held = [lag.held(end - lag.lookahead, end) for end in ends]  # by the draft, once the prompt is in the caches
    return {
        "chunks": Chunk(**{name: stacked([getattr(chunk, name) for chunk in made]) for name in fields}),
        "ready": [ride.ready.get(request, 0) for request in requests],
        "draft_lens": [h if r in ride.ready else r.draft_len for r, h in zip(requests, held, strict=True)],
    }
