"""Engine options for generating training data: as many sequences at once as fit into memory."""

from __future__ import annotations

from typing import Any

import jax

from jaxspec.cache.budget import memory
from jaxspec.engine.batch import power_of_two
from jaxspec.engine.sizing import temporary_bytes
from jaxspec.hardware.platforms import facts
from jaxspec.inspect.fit import page_bytes, weight_bytes
from jaxspec.loading.weights import compute_dtype
from jaxspec.models.config import ModelConfig
from jaxspec.models.model import Model
from jaxspec.options.engine import EngineConfig
from jaxspec.train.data_options import DataOptions
from pallas_kernels.device import here


def engine_options(options: DataOptions, config: ModelConfig | None = None, dtype: str = "auto") -> dict[str, Any]:
    """Return the options of an LLM that generates training data.

    The LLM has pages for all rows, so that no running request waits for a page or is preempted. It prefills the prompts
    of all rows in one pass.

    config: the target's configuration. With it, the number of rows is halved until all fits into memory, or
      one row is left. If options.rows sets the number, it is not halved. dtype: compute dtype of the LLM.
    """
    rows = options.rows or facts(jax.default_backend()).text_rows
    found = with_rows(options, rows)
    while config and not options.rows and rows > 1 and not fits(found, config, dtype):
        rows //= 2
        found = with_rows(options, rows)
    return found


def fits(options: dict[str, Any], config: ModelConfig, dtype: str) -> bool:
    """Return whether an engine with these options fits into memory; True if the device does not report its memory."""
    device = here()
    stats = memory(jax.devices()[0])
    if stats is None:
        return True
    compute = compute_dtype(dtype, device)
    engine = EngineConfig(**options)
    pages = options["num_pages"] * page_bytes(config, compute, 1, device.platform)
    temporary = temporary_bytes({"target": Model(config, {})}, engine, None, device.platform)
    needed = weight_bytes(config, compute, 1) + pages + temporary
    return bool(needed <= engine.memory_utilization * stats["bytes_limit"])


def with_rows(options: DataOptions, rows: int) -> dict[str, Any]:
    """Return the engine options for decoding this number of rows at once."""
    page_size = facts(jax.default_backend()).page_size
    return {
        "max_model_len": options.length,
        "max_num_seqs": rows,
        "page_size": page_size,
        "num_pages": rows * -(-options.length // page_size),
        "enable_prefix_caching": False,
        "grammar_pool_mib": 0,  # no answer has a grammar
        "prefill_chunk": max(power_of_two(options.length) * power_of_two(rows) // 2, 16),
    }
