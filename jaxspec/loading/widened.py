"""The weights of a small quantised model, widened once and kept on disk: to read four times as much takes less time
than to widen them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxspec.common.trust import trusted
from jaxspec.loading.resolved import ResolvedModel
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import abstract_params
from jaxspec.models.model import Model
from jaxspec.models.storage import narrow
from jaxspec.parallel.placement import Placement
from jaxspec.runtime.stored import keep, sources
from pallas_kernels.weights.output_first import Streamed

LARGEST = 1 << 27  # bytes of the model's file: widened, it is several times as large


def load_widened(
    found: ResolvedModel,
    dtype: Any,
    backend: Backend,
    placement: Placement,
    folder: Path,
    load: Callable[[], Model],
) -> Model:
    """What `load` gives, stored for this backend; from the folder where it is there, else put there for the next time.
    Only models that programs read output-first, which is a CPU's float32, that come from a GGUF file, and whose numbers
    bfloat16 does not hold."""
    source, wide = found.source, backend.streams and dtype == np.float32 and placement.alone
    if source.kind != "gguf" or not wide or source.path.stat().st_size > LARGEST:
        return load()
    path = folder / f"{hashlib.sha256(str(source.path.resolve()).encode()).hexdigest()}.safetensors"
    wanted = fingerprint(source.path)
    if (stored := read(path, wanted)) is not None:
        known = abstract_params(found.config, dtype, placement)  # in the order of load's: programs go by it
        arrays = {name: jax.device_put(stored[name], p.sharding) for name, p in known.items()}
        matrices = {name: Streamed(arrays[name]) for name, p in known.items() if p.kind == "matrix"}
        return Model(found.config, arrays | matrices)
    model = load()
    if not narrow(model.params):
        arrays = {name: np.asarray(x.array if isinstance(x, Streamed) else x) for name, x in model.params.items()}
        keep(path, lambda new: save_file(arrays, new, metadata={"of": wanted}))
    return model


def fingerprint(path: Path) -> str:
    """Of the file, and of what reads it."""
    known = path.stat()
    return json.dumps([str(path.resolve()), known.st_size, known.st_mtime_ns, sources()])


def read(path: Path, wanted: str) -> dict[str, np.ndarray] | None:
    """Return None where it is missing, damaged, of another file, or another user can have written it."""
    try:
        with trusted(path) as opened, safe_open(f"/dev/fd/{opened.fileno()}", framework="numpy") as file:
            if (file.metadata() or {}).get("of") != wanted:
                return None
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
