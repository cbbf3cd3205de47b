"""What a head reads of the target, of all the data: found once and kept on disk."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.backend import Backend
from jaxspec.models.model import Model
from jaxspec.parallel.placement import Placement
from jaxspec.train.data import Rows
from jaxspec.train.kept import Records, digest
from jaxspec.train.passes import read


def kept(
    folder: Path,
    target: Model,
    rows: Rows,
    count: int,
    taps: tuple[int, ...],
    *,
    batch_size: int,
    backend: Backend,
    devices: Placement,
) -> Records:
    """Of the first `count` rows, as records [count]: seen [T,E], what leaves the target's last norm, and where there
    are taps, tapped [T,_*E], what goes into these layers, one beside the other; in the target's dtype.

    They lie in a file in the folder, whose name tells the target, the rows and the layers. Arguments and errors as of
    `jaxspec.train.kept.Records`.
    """
    length, width, dtype = rows.tokens.shape[1], target.config.width, np.dtype(target.dtype)
    fields = [("seen", dtype, (length, width)), ("tapped", dtype, (length, len(taps) * width))]
    record = np.dtype(fields if taps else fields[:1])
    layers = "-".join(map(str, taps)) or "last"
    params = jax.device_put(target.params, devices.sharding())

    @jax.jit
    def find(params, tokens):
        _, seen, tapped = read(target.config, params, {"tokens": tokens}, backend, taps)
        return {"seen": seen} | ({"tapped": jnp.concatenate(tapped, axis=-1)} if taps else {})

    return Records(
        folder / f"features-{layers}-{dtype.name}-{digest(target, rows)}.bin",
        record,
        rows,
        count,
        lambda tokens: find(params, tokens),
        what="what the target computes",
        remedy="leave --keep-features out or lower --steps",
        batch_size=batch_size,
        devices=devices,
    )
