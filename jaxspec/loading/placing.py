"""The devices that a target and its draft lie on."""

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


def placed(draft: ResolvedModel | None, config: EngineConfig, speculative: SpeculativeConfig | None) -> Placement:
    """Return where a target lies, and by its axes the draft, as was asked for or is expected to be fastest."""
    degree, asked = config.tensor_parallel_size, speculative.draft_tensor_parallel_size if speculative else None
    if speculative is None or draft is None or not (degree > 1 or asked):
        return make_placement(degree)
    device = here()
    dtype = compute_dtype(speculative.dtype or config.dtype, device)
    size = asked or draft_degree(draft.config, degree, dtype, device)
    logger.info("the draft is cut over %d of %d devices", size, degree)
    return make_placement(degree, draft_size=size)


def draft_degree(config: ModelConfig, degree: int, dtype: Any, device: Device) -> int:
    """Into how many parts a draft beside a target of this degree is best cut: what a part saves of reading weights
    against the two sums a layer that it costs."""
    known, able = facts(device.platform), divisors(math.gcd(degree, *itertools.chain(*divided_sizes(config).values())))
    shapes: Any = parameters(config, dtype)
    read = weight_bytes(config, shapes)
    sums = 2 * config.num_layers * known.all_reduce
    return min(able, key=lambda d: read / d / known.bandwidth + (sums if d > 1 else 0.0))
