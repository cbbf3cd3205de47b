"""The target's hidden states that a head reads, for all training rows: computed once and kept on disk."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.common.shapes import Array, Int
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import Params
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
    """Return the target's features (hidden states that a head reads) of the first `count` rows, in a file on disk.

    A row's record has the field seen [T,E], the hidden states after the target's last norm. With `taps`, it also has
    tapped [T,_*E], the concatenated inputs of the target layers with these indices. Both have the target's dtype. The
    file is in the folder, and its name identifies the target, the rows and the layers. See `jaxspec.train.kept.Records`
    for the other arguments and the errors.
    """
    length = rows.tokens.shape[1]
    width = target.config.width
    dtype = np.dtype(target.dtype)
    fields = [("seen", dtype, (length, width)), ("tapped", dtype, (length, len(taps) * width))]
    record = np.dtype(fields if taps else fields[:1])
    layers = "-".join(map(str, taps)) or "last"
    params = jax.device_put(target.params, devices.sharding())

    @jax.jit
    def find(params: Params, tokens: Int[Array, "B T"]) -> dict[str, Array]:
        _, seen, tapped = read(target.config, params, {"tokens": tokens}, backend, taps)
        if not taps:
            return {"seen": seen}
        return {"seen": seen, "tapped": jnp.concatenate(tapped, axis=-1)}

    return Records(
        folder / f"features-{layers}-{dtype.name}-{digest(target, rows)}.bin",
        record,
        rows,
        count,
        lambda tokens: find(params, tokens),
        what="the target's features",
        remedy="leave --keep-features out or lower --steps",
        batch_size=batch_size,
        devices=devices,
    )
