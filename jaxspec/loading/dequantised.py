"""A cache on disk of the dequantised weights of small quantised models.

Reading four times as many bytes takes less time than dequantising the weights again.
"""

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
from jaxspec.runtime.program_files import keep, sources
from pallas_kernels.weights.output_first import Streamed

LARGEST = 1 << 27  # bytes of the model's file; dequantised weights are several times as large


def load_dequantised(
    found: ResolvedModel,
    dtype: Any,
    backend: Backend,
    placement: Placement,
    folder: Path,
    load: Callable[[], Model],
) -> Model:
    """Return the model that `load` returns: from the cache if it is there, else loaded and written to the cache.

    The cache is used only for GGUF files of at most LARGEST bytes, and only where programs read float32 matrices
    output-first, which is on a CPU. A model whose weights bfloat16 holds exactly is not written to it.
    """
    source = found.source
    streamed = backend.streams and dtype == np.float32 and placement.alone
    if source.kind != "gguf" or not streamed or source.path.stat().st_size > LARGEST:
        return load()
    path = folder / f"{hashlib.sha256(str(source.path.resolve()).encode()).hexdigest()}.safetensors"
    wanted = fingerprint(source.path)
    stored = read(path, wanted)
    if stored is not None:
        known = abstract_params(found.config, dtype, placement)  # the order of its names is part of compiled programs
        arrays = {name: jax.device_put(stored[name], p.sharding) for name, p in known.items()}
        matrices = {name: Streamed(arrays[name]) for name, p in known.items() if p.kind == "matrix"}
        return Model(found.config, arrays | matrices)
    model = load()
    if not narrow(model.params):
        arrays = {name: np.asarray(x.array if isinstance(x, Streamed) else x) for name, x in model.params.items()}
        keep(path, lambda new: save_file(arrays, new, metadata={"of": wanted}))
    return model


def fingerprint(path: Path) -> str:
    """Return a description of the file and of the code that reads it, to detect a cache that is stale."""
    stat = path.stat()
    return json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns, sources()])


def read(path: Path, wanted: str) -> dict[str, np.ndarray] | None:
    """Return the cached arrays by name.

    Return None where the cache is missing, damaged or of another file, or where another user can have written it.
    """
    try:
        with trusted(path) as opened, safe_open(f"/dev/fd/{opened.fileno()}", framework="numpy") as file:
            if (file.metadata() or {}).get("of") != wanted:
                return None
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
