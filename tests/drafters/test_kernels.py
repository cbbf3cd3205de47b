"""Rounds of every drafter, of one row and of some, with the kernels of GPUs and TPUs: traced at the widths of real
models, and run where these are interpreted. Which kernels a head's own layers take depends on its shapes, and tiny ones
take none."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.bench.presets import preset
from jaxspec.models.decoder import random_params
from jaxspec.models.model import Model
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.parallel.placement import make_placement
from jaxspec.runtime.packing import pack
from jaxspec.runtime.programs import FUNCTIONS
from pallas_kernels.device import Device
from tests.pallas_kernels.flavours import H100
from tests.support import lively_models, tiny_models
from tests.support.lively_heads import KINDS
from tests.support.sizes import cases
from tests.support.tpu_program import Program, first_layers

LAYERS, K = 4, 3
# As wide as kernels want it.
WIDE = dataclasses.replace(tiny_models.BASE, width=128, head_dim=32, mlp_width=128)
CASES = [(kind, target) for kind in KINDS for target in ("smollm2-135m", "qwen3-0.6b")]


class Traced(Program):
    """`launch` and `prefill` give the operations of the program."""

    def devices(self, chip: str):
        return jax.devices()[:1]

    def compile(self, name: str, *arrays: Any) -> str:
        program = functools.partial(FUNCTIONS[name], self.config)
        return str(jax.make_jaxpr(program)(self.params, self.cache, *pack(arrays).unpack()))


@pytest.mark.parametrize("device", [H100, Device("tpu")], ids=["gpu", "tpu"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("draft_dtype", [None, "float32"])
@cases(("kind", "target"), CASES, quick=[("eagle3", "smollm2-135m")])
def test_kernels_of_real_widths(kind, target, draft_dtype, rows, device, monkeypatch):
    monkeypatch.setattr(Traced, "device", device)
    monkeypatch.setattr(Traced, "draft_dtype", draft_dtype)
    model = first_layers(preset(target), LAYERS)
    options = {"max_num_seqs": rows, "max_model_len": 256, "num_pages": 100}
    program = Traced("", model, KINDS[kind][1](model), num_drafts=K, **options)
    for step in (program.launch, program.prefill):
        assert "pallas_call" in step()


class Interpreted(Device):
    """A GPU whose kernels run here. One that asks for the next kernel early would do so in its own instructions."""

    interpret = True

    def __init__(self) -> None:
        super().__init__("gpu", (8, 0))


@pytest.mark.thorough
@cases("rows", [1, 2], quick=[1], rest=[])
@cases("kind", KINDS, quick=["eagle3"], rest=["dflash"])
def test_kernels_draft_what_plain_forms_draft(kind, rows):
    """Accepted by lot, so that drafts are the text."""
    weights = lambda config, seed: Model(config, random_params(config, jnp.bfloat16, make_placement(), seed))
    target, draft = weights(WIDE, 3), weights(KINDS[kind][1](WIDE), 1)
    spec = {"method": KINDS[kind][0], "num_speculative_tokens": K} | ({} if kind == "mtp" else {"model": kind})
    spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (0.9, 0.8, 0.7)}
    options = {"max_model_len": 64, "page_size": 16, "num_pages": 12, "max_num_seqs": rows}

    def texts(device, kernels):
        engine = tiny_models.engine(target, spec, draft, device=device, kernels=kernels, **options)
        sampling = [SamplingParams(temperature=0.0, max_tokens=16, seed=row) for row in range(rows)]
        return lively_models.texts(lively_models.serve(engine, lively_models.PROMPTS[1:][:rows], sampling, rounds=4))

    found = texts(Interpreted(), "pallas")
    assert [len(text) for text in found] == [16] * rows
    assert found == texts(None, "reference")
