"""What a drafter is given: rows of committed ids as a History."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.base import History
from jaxspec.engine.batch import padded


def history(
    rows: Sequence[Sequence[int]],
    room: int,
    wanted: int | Sequence[int],
    live: bool | Sequence[bool] = True,
    rubbish: int = 0,
) -> History:
    """room: for ids of a row; wanted: drafts of each; rubbish fills what lies beyond. A draft's cache lacks the last
    id."""
    count = np.array([len(ids) for ids in rows], np.int32)
    each = lambda x, dtype: jnp.broadcast_to(jnp.asarray(np.array(x, dtype)), count.shape)
    return History(
        tokens=jnp.asarray(padded(rows, len(rows), room, rubbish)),
        num_tokens=jnp.asarray(count),
        draft_len=jnp.asarray(count - 1),
        block_table=jnp.zeros((len(rows), 1), jnp.int32),
        num_wanted=each(wanted, np.int32),
        live=each(live, bool),
    )
