"""Placement of a target and its draft on devices, and the number of devices to shard the draft over."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

from jaxspec.hardware.platforms import facts
from jaxspec.loading.resolved import ResolvedModel
from jaxspec.loading.weights import compute_dtype
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters, weight_bytes
from jaxspec.models.sharding import divided_sizes
from jaxspec.options.engine import EngineConfig
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.placement import Placement, divisors, make_placement
from pallas_kernels.device import Device, here

logger = logging.getLogger(__name__)


def placement_for(
    draft: ResolvedModel | None, config: EngineConfig, speculative: SpeculativeConfig | None
) -> Placement:
    """Return the placement of a target, whose mesh axes also define the placement of its draft.

    The draft has as many shards as the option draft_tensor_parallel_size says. Without this option it has the number of
    shards that is expected to be fastest.
    """
    degree = config.tensor_parallel_size
    asked = speculative.draft_tensor_parallel_size if speculative else None
    if speculative is None or draft is None or not (degree > 1 or asked):
        return make_placement(degree)
    device = here()
    dtype = compute_dtype(speculative.dtype or config.dtype, device)
    size = asked or draft_degree(draft.config, degree, dtype, device)
    logger.info("the draft is cut over %d of %d devices", size, degree)
    return make_placement(degree, draft_size=size)


def draft_degree(config: ModelConfig, degree: int, dtype: Any, device: Device) -> int:
    """Return the number of shards that is expected to be fastest for a draft beside a target of `degree` shards.

    With more shards, each device reads fewer weights. Sharding over two or more devices costs two all-reduces a layer,
    whatever their number.
    """
    platform = facts(device.platform)
    possible = divisors(math.gcd(degree, *itertools.chain(*divided_sizes(config).values())))
    shapes: Any = parameters(config, dtype)
    read = weight_bytes(config, shapes)
    sums = 2 * config.num_layers * platform.all_reduce
    return min(possible, key=lambda d: read / d / platform.bandwidth + (sums if d > 1 else 0.0))
