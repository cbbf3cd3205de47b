"""Rounds of every drafter, of one row and of some, hold together with the kernels of GPUs and TPUs, at widths of real
models: traced, not compiled. Which kernels a head's own layers take depends on its shapes, and tiny ones take none."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest

from jaxspec.bench.presets import preset
from jaxspec.decode.packing import pack
from jaxspec.decode.programs import FUNCTIONS
from pallas_kernels.device import Device
from tests.lively_heads import KINDS
from tests.pallas_kernels.flavours import H100
from tests.sizes import cases
from tests.tpu_program import Program, first_layers

LAYERS = 4
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
@cases(("kind", "target"), CASES, quick=[("eagle3", "smollm2-135m")])
def test_kernels_of_real_widths(kind, target, rows, device, monkeypatch):
    monkeypatch.setattr(Traced, "device", device)
    model = first_layers(preset(target), LAYERS)
    options = {"max_num_seqs": rows, "max_model_len": 256, "num_pages": 100}
    program = Traced("", model, KINDS[kind][1](model), num_drafts=3, **options)
    for step in (program.launch, program.prefill):
        assert "pallas_call" in step()
