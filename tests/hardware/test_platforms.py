"""What the compiler is told about the CPU that is there."""

from __future__ import annotations

import importlib
import types

import numpy as np
import pytest

from jaxspec.hardware.platforms import cpu_features, vector_width

AVX512 = {"AVX": True, "AVX2": True, "AVX512F": True}
AVX2 = {"AVX": True, "AVX2": True, "AVX512F": False}
ARM = {"NEON": True, "ASIMD": True, "SVE": False}
WIDE = {"xla_cpu_prefer_vector_width": 512}


@pytest.mark.parametrize(
    ("features", "flags", "options"),
    [
        (AVX512, "", WIDE),
        (AVX512, "--xla_cpu_max_isa=AVX512_VNNI --xla_dump_to=x", WIDE),
        (AVX512, "--xla_cpu_max_isa=amx", WIDE),
        (AVX512, "--xla_cpu_max_isa=AVX2", {}),
        (AVX512, "--xla_cpu_max_isa=AVX512 --xla_cpu_max_isa=AVX", {}),
        (AVX512, "--xla_cpu_max_isa=AVX --xla_cpu_max_isa=AVX512", WIDE),
        (AVX2, "", {}),
        (AVX2, "--xla_cpu_max_isa=AVX512", {}),
        (ARM, "", {}),
        ({}, "", {}),
    ],
)
def test_vectors_of_512_bits_only_where_registers_hold_them(features, flags, options):
    assert vector_width(features, flags) == options


def test_features_are_this_machines(monkeypatch):
    assert all(isinstance(there, bool) for there in cpu_features().values())
    assert cpu_features(), f"numpy {np.__version__} does not say what the CPU can do: 512-bit registers go unused"
    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace())
    assert cpu_features() == {}
