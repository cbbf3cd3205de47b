"""A cache on disk of the dequantised weights of small quantised models.

Dequantised weights have several times as many bytes. Still, reading them takes less time than dequantising again.
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

from jaxspec.common.trust import keep, trusted
from jaxspec.loading.resolved import ResolvedModel
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import abstract_params
from jaxspec.models.model import Model
from jaxspec.models.storage import narrow
from jaxspec.parallel.placement import Placement
from jaxspec.runtime.program_files import sources
from pallas_kernels.weights.output_first import Streamed

LARGEST = 1 << 27  # largest size in bytes of a model's quantised file for which the cache is used


def load_dequantised(
    found: ResolvedModel,
    dtype: Any,
    backend: Backend,
    placement: Placement,
    folder: Path,
    load: Callable[[], Model],
) -> Model:
    """Return a model from the cache if it is there. Otherwise call `load`, write the model to the cache and return it.

    The cache is used only for GGUF files of at most LARGEST bytes, and only if programs read float32 matrices with the
    output axis first, as on a CPU. A model whose weights bfloat16 represents exactly is not written to the cache.

    found: the model's checkpoint and configuration.
    folder: folder of the cache.
    load: function that reads and dequantises the model.
    """
    source = found.source
    streamed = backend.streams and dtype == np.float32 and placement.alone
    if source.kind != "gguf" or not streamed or source.path.stat().st_size > LARGEST:
        return load()
    path = folder / f"{hashlib.sha256(str(source.path.resolve()).encode()).hexdigest()}.safetensors"
    wanted = fingerprint(source.path)
    stored = read(path, wanted)
    if stored is not None:
        known = abstract_params(found.config, dtype, placement)  # names in the order that compiled programs need
        arrays = {name: jax.device_put(stored[name], p.sharding) for name, p in known.items()}
        matrices = {name: Streamed(arrays[name]) for name, p in known.items() if p.kind == "matrix"}
        return Model(found.config, arrays | matrices)
    model = load()
    if not narrow(model.params):
        arrays = {name: np.asarray(x.array if isinstance(x, Streamed) else x) for name, x in model.params.items()}
        keep(path, lambda new: save_file(arrays, new, metadata={"of": wanted}))
    return model


def fingerprint(path: Path) -> str:
    """Return a description of a model's file and of the code that reads it, to detect a stale cache."""
    stat = path.stat()
    return json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns, sources()])


def read(path: Path, wanted: str) -> dict[str, np.ndarray] | None:
    """Return the arrays in a file of the cache, by name.

    Return None if the file is missing or damaged, if its fingerprint is not `wanted`, or if another user of the machine
    could have written it.
    """
    try:
        with trusted(path) as opened, safe_open(f"/dev/fd/{opened.fileno()}", framework="numpy") as file:
            if (file.metadata() or {}).get("of") != wanted:
                return None
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
