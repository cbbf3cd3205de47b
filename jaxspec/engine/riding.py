"""Prompts that ride along: their pieces are computed in the passes in which other rows decode, and a row whose prompt
is in the caches decodes from the next round of the same launch on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.cache.pages import CacheLayout
from jaxspec.drafters.base import Chunk
from jaxspec.engine.batch import ChunkShape, Piece, chunk_input
from jaxspec.engine.request import Request

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


def chunks(ride: Ride, layout: CacheLayout, shape: ChunkShape, row_pages: int) -> Chunk:
    """What the launch takes: one Chunk a round, stacked, as many as there may ever be."""
    made = [chunk_input(rows, layout, shape, row_pages=row_pages) for rows in ride.passes]
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *made)
    fill = lambda x: np.concatenate([x, np.zeros((MOST - len(made), *x.shape[1:]), x.dtype)])
    return jax.tree.map(fill, stacked)
