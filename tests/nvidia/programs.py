"""The device program, as the engine sets it up on a GPU: launches and prefill of a few layers, and of whole models."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxspec.bench.presets import preset
from jaxspec.decode.state import Variant
from jaxspec.engine import assembly
from jaxspec.hardware.accelerators import ACCELERATORS
from jaxspec.models.config import ModelConfig
from jaxspec.parallel.mailbox import NAMES
from jaxspec.verify import rules
from pallas_kernels._peer_sum import mailbox_size, supported
from tests.nvidia.compile import compile, mesh
from tests.nvidia.gpus import GPUS
from tests.support.published_shapes import assistant, published
from tests.support.tpu_program import Program, first_layers

ROWS, DRAFTS = 8, 4
SMALL = {"max_num_seqs": ROWS, "max_model_len": 1024, "num_pages": 500}
QWEN = ("qwen3-0.6b", 1)  # whose prefill has no attention: nobody reads what the last layer attends to
DENSE = ("smollm3-3b", "ministral-3-3b", "granite-3.3-8b", "phi-4-mini", "olmo-3-7b")  # families of no preset
FAMILIES = ("gemma-4-e2b", "gemma-4-31b", "muse-glimmer-30b", *DENSE)
PROGRAMS: dict[str, dict[str, Any]] = {
    "few layers": {"target": ("qwen3-0.6b", 2), "draft": QWEN, **SMALL},
    "sampling": {"target": QWEN, "draft": QWEN, "variant": Variant(frozenset({rules.UNSEEDED})), **SMALL},
    "one row": {"target": ("smollm2-135m", 2), "draft": ("smollm2-135m", 1), **SMALL, "max_num_seqs": 1},
    "eagle3": {"target": ("qwen3-8b", 2), "draft": ("eagle3", None), **SMALL, "max_num_seqs": 1},
    "dflash": {"target": ("qwen3-8b", 2), "draft": ("dflash", None), "num_drafts": 15, **SMALL, "max_num_seqs": 1},
    "two GPUs": {"target": ("qwen3-8b", 2), "draft": QWEN, "draft_degree": 1, "gpus": 2, **SMALL},
    "two GPUs, one row": {
        **{"target": ("qwen3-8b", 2), "draft": QWEN, "draft_degree": 2, "gpus": 2},
        **SMALL | {"max_num_seqs": 1},
    },
    "two GPUs, plain": {"target": ("qwen3-8b", 2), "num_drafts": 0, "gpus": 2, **SMALL | {"max_num_seqs": 1}},
    "muse-glimmer-30b": {
        **{"target": ("muse-glimmer-30b", 4), "draft": ("muse-glimmer-30b", None), "num_drafts": 15},
        **SMALL | {"max_num_seqs": 1},
    },
    "gemma-4-e2b": {"target": ("gemma-4-e2b", None), "draft": ("gemma-4-e2b", None), "max_model_len": 4096},
    # Five layers with a window, in a pool of their own, and one without.
    "gemma-4-31b": {"target": ("gemma-4-31b", 6), "max_model_len": 32768, "num_pages": 4096},
    **{name: {"target": (name, None), "max_model_len": 4096} for name in DENSE},
    # A T4 has no bfloat16. All layers need as much temporary memory as these.
    "int4": {
        **{"target": ("qwen3-8b", 6), "draft": ("eagle3", None), "forms": {"target": "int4", "draft": "int4"}},
        **{"dtype": "float16", "max_model_len": 4096},
    },
    "whole": {"target": ("qwen3-0.6b", None), "draft": ("smollm2-135m", None), "max_model_len": 4096},
}


def shapes(name: str, target: ModelConfig | None = None) -> ModelConfig:
    """A preset, or a published model of FAMILIES. target: the model whose draft this is."""
    if name not in FAMILIES:
        return preset(name, target)
    return assistant(name, target) if target else published(name)


class GpuProgram(Program):
    """`compile` gives what `gpus.Compiled` wants to know of the program."""

    def __init__(self, gpu: str, target: Any, draft: Any = None, gpus: int = 1, **options: Any) -> None:
        self.gpus, self.device = mesh(gpu, gpus), GPUS[gpu].device
        config = lambda name, layers, *beside: first_layers(shapes(name, *beside), layers)
        model = config(*target)
        super().__init__(gpu, model, config(*draft, model) if draft else None, **{"num_drafts": DRAFTS} | options)
        for name, place in assembly.placements(self.models, self.placement).items():
            if place.degree == 2 and supported(self.device):
                sizes = 2 * mailbox_size(self.models[name].config.width), 4
                arrays = (jax.ShapeDtypeStruct((n,), jnp.int32, sharding=place.sharding(P(place.axes))) for n in sizes)
                self.params[name] |= dict(zip(NAMES, arrays, strict=True))

    def devices(self, chip: str):
        return self.gpus.devices.flat

    def memory(self, chip: str) -> int:
        return ACCELERATORS[GPUS[chip].facts].programs_memory

    def compiled(self, lowered: jax.stages.Lowered) -> dict[str, Any]:
        places = assembly.placements(self.layouts, self.placement)
        pages = sum(x.pool_bytes(places[n].degree, "gpu") for n, x in self.layouts.items())
        weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.params))
        return compile(lowered)[1] | {"pages": pages, "weights": weights, "reserved": self.reserved}


def cases(name: str, _: Mesh) -> dict[str, Callable[[], dict[str, Any]]]:
    def build(step: str, options: dict[str, Any]) -> dict[str, Any]:
        built = GpuProgram(name, **options)
        if options is PROGRAMS["few layers"]:
            built.kept = Path(tempfile.mkdtemp())
        return getattr(built, step)()

    return {
        f"{program}, {step}": functools.partial(build, step, options)
        for program, options in PROGRAMS.items()
        for step in (("launch", "prefill") if options["target"] != QWEN else ("launch",))
    }
