"""The target's most probable next tokens, for all training rows: computed once and kept on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import Params, bind, whole
from jaxspec.models.model import Model
from jaxspec.parallel.placement import Placement
from jaxspec.train.data import Rows, id_dtype
from jaxspec.train.kept import Records, digest
from jaxspec.train.loss import cut, num_pieces


def kept(
    folder: Path,
    target: Model,
    rows: Rows,
    count: int,
    n: int,
    *,
    batch_size: int,
    backend: Backend,
    devices: Placement,
) -> Records:
    """Return the target's n most probable next tokens at every position of the first `count` rows, in a file on disk.

    A row's record has the fields ids [T, n], the most probable first, and log_p f16[T, n], their log-probabilities
    among all ids. The file is in the folder, and its name identifies the target, the rows and n. See
    `jaxspec.train.kept.Records` for the other arguments and the errors.
    """
    vocab_size, length = target.config.vocab_size, rows.tokens.shape[1]
    record = np.dtype([("ids", id_dtype(vocab_size), (length, n)), ("log_p", np.float16, (length, n))])
    params = jax.device_put(target.params, devices.sharding())

    @jax.jit
    def find(params: Params, tokens: Int[Array, "B T"]) -> dict[str, Array]:
        hidden = whole(target.config, params, tokens, backend)[1]

        def of_piece(hidden: Array) -> tuple[Array, Array]:
            return top(bind(target.config, params).logits(hidden, backend), n)

        def joined(pieces: Array, dtype: Any) -> Array:
            return pieces.swapaxes(0, 1).reshape(batch_size, length, n).astype(dtype)

        ids, log_p = lax.map(of_piece, cut(hidden, num_pieces(batch_size, length, vocab_size)))
        return {"ids": joined(ids, record["ids"].base), "log_p": joined(log_p, jnp.float16)}

    return Records(
        folder / f"top-{n}-{digest(target, rows)}.bin",
        record,
        rows,
        count,
        lambda tokens: find(params, tokens),
        what=f"the target's {n} most probable ids",
        remedy="lower --top-n or --steps",
        batch_size=batch_size,
        devices=devices,
    )


def top(logits: Float[Array, "*rest V"], n: int) -> tuple[Int[Array, "*rest n"], Float[Array, "*rest n"]]:
    """Return the n most probable ids, in falling order, and their log-probabilities.

    On GPUs lax.top_k sorts its whole input (https://github.com/openxla/xla/issues/25487). So the logits are divided
    into groups: the n largest logits are in the n groups with the largest maxima. For SmolLM2's 49,152 ids and n = 64,
    this leaves 1,536 group maxima and 2,048 logits to sort.
    """
    vocab_size = logits.shape[-1]
    members = 1 << (vocab_size // n).bit_length() // 2
    groups = -(-vocab_size // members)
    lacking = [(0, 0)] * (logits.ndim - 1) + [(0, members * groups - vocab_size)]
    table = jnp.pad(logits, lacking, constant_values=-jnp.inf).reshape(*logits.shape[:-1], members, groups)
    best = lax.top_k(jnp.max(table, axis=-2), n)[1]
    table = jnp.take_along_axis(table, best[..., None, :], axis=-1)
    found, at = lax.top_k(table.reshape(*logits.shape[:-1], members * n), n)
    ids = at // n * groups + jnp.take_along_axis(best, at % n, axis=-1)
    return ids, found - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
