"""Computation of the size of a default engine's page pool, from shapes and from the memory of a device."""

from __future__ import annotations

from typing import Any

import jax

from jaxspec.cache import budget
from jaxspec.cache.pages import features_layout
from jaxspec.engine.sizing import demand, temporary_bytes
from jaxspec.hardware.accelerators import Accelerator
from jaxspec.hardware.platforms import facts
from jaxspec.loading.weights import compute_dtype
from jaxspec.models.config import ModelConfig
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.model import Model
from jaxspec.models.paged import cache_layout
from jaxspec.options.engine import EngineConfig
from jaxspec.options.speculative import SpeculativeConfig
from pallas_kernels.device import Device


def pool(
    configs: dict[str, ModelConfig], weight_bytes: int, chip: Device, absent: Accelerator | None
) -> dict[str, Any]:
    """Return the memory of the default engine and the number of pages that fit, computed as in `engine.assembly`.

    window_pages is the number of pages in the target's layers with a window, None if they have as many as all layers.

    configs: configurations of the models, under "target" and "draft".
    weight_bytes: bytes of the weights of all these models together.
    chip: device for which programs are compiled.
    absent: data sheet of the device, or None for this machine's first device.
    """
    options = EngineConfig()
    platform = facts(chip.platform)
    models = {name: Model(config, {}) for name, config in configs.items()}
    speculative = SpeculativeConfig(model="draft") if "draft" in models else None
    temporary = temporary_bytes(models, options, speculative, chip.platform)
    taken = temporary + weight_bytes
    memory: int | None
    if absent is not None:
        memory = int(absent.programs_memory * options.memory_utilization)
        free = memory - taken
    else:
        # The weights are not loaded, so their bytes are subtracted here. A pool of fixed size ignores them.
        free = budget.free_memory(jax.devices()[0], options.memory_utilization, taken)
        memory = None if platform.cache_bytes else free + taken
    layout: dict[str, Any] = {"page_size": platform.page_size, "num_pages": 1, "dtype": compute_dtype("auto", chip)}
    layouts = {name: cache_layout(config, **layout, platform=chip.platform) for name, config in configs.items()}
    width = draft_spec(configs["draft"]).features_width if "draft" in configs else 0
    layouts["features"] = features_layout(width, **layout)
    longest = configs["target"].max_model_len
    needs = demand(layouts, options, speculative, longest, dict.fromkeys(layouts, 1), chip.platform)
    pages, window_pages = budget.pools(free, needs) if free >= sum(needs.page_bytes) else (0, None)
    return {
        "memory_bytes": memory,
        "temporary_bytes": temporary,
        "page_size": platform.page_size,
        "pages": pages,
        "window_pages": window_pages,
        "tokens_that_fit": pages * platform.page_size,
    }
