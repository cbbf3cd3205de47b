"""Quantised matrices as other libraries store them: in the formats of compressed-tensors and of quant_method fp8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from checkpoints.eight_bit_tensors import PACKED, SCALES, SHAPE, ZEROS
from checkpoints.published import BLOCK, FOUR
from jaxspec.options.quantization import Quantization
from pallas_kernels.weights import AnyWeight
from pallas_kernels.weights.grouped import Grouped, unpacked
from pallas_kernels.weights.scaled import Scaled


def quantization_config(form: Quantization, ignored: Sequence[str]) -> dict[str, Any]:
    """Return the entry `quantization_config` of a config.json. ignored: names of the modules that are not quantised.

    Blocks of both axes have quant_method fp8, all other forms compressed-tensors, without activations in 8 bits.
    """
    bits = 4 if form.dtype == FOUR else 8
    if form.inputs and form.outputs == form.inputs:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [form.outputs, form.inputs],
            "modules_to_not_convert": list(ignored),
        }
    whole = form.dtype in ("int8", FOUR)
    strategy = "group" if form.inputs else "channel" if form.outputs else "tensor"
    kind = "int" if whole else "float"
    weights: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": not form.zeros, "dynamic": False}
    weights |= {"strategy": strategy, "group_size": form.inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if whole else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(ignored),
    }


def stored(name: str, weight: AnyWeight, form: Quantization) -> dict[str, np.ndarray]:
    """Return the tensors in which a matrix is stored. name: name of the tensor that an unquantised matrix has.

    Integers are packed, because vLLM reads integer weights without integer activations only so.
    """
    if isinstance(weight, Grouped):
        return four_bits(name, weight)
    assert isinstance(weight, Scaled)
    values, scale = np.asarray(weight.values), np.asarray(weight.scale)
    if form.inputs == form.outputs == BLOCK:
        return {name: values, name + SCALES[0]: scale}
    scale = scale if form.outputs else scale.reshape(1)
    if form.dtype != "int8":
        return {name: values, name + SCALES[1]: scale}
    offset = np.pad(values.view(np.uint8) ^ np.uint8(128), ((0, 0), (0, -values.shape[1] % 4)))
    return {
        name + PACKED: np.ascontiguousarray(offset).view("<i4").astype(np.int32),
        name + SHAPE: np.asarray(values.shape, np.int64),
        name + SCALES[1]: scale,
    }


def four_bits(name: str, weight: Grouped) -> dict[str, np.ndarray]:
    """Return the tensors of compressed-tensors in which a matrix of 4 bits is stored. name: as in `stored`."""
    values = unpacked(np.asarray(weight.values[0]), 4)
    tensors = {
        name + PACKED: words(values),
        name + SHAPE: np.asarray(values.shape, np.int64),
        name + SCALES[1]: np.asarray(weight.scale[0]),
    }
    if weight.zeros is not None:
        zeros = np.asarray(weight.zeros).view(np.uint8)
        tensors[name + ZEROS] = np.ascontiguousarray(words(zeros.T).T)  # words hold neighbouring outputs
    return tensors


def words(values: np.ndarray) -> np.ndarray:
    """Return integers u8[..., n] as words i32[..., n / 8], filled up with zeros."""
    filled = np.pad(values, ((0, 0), (0, -values.shape[1] % 8)))
    pairs = np.ascontiguousarray(filled[:, ::2] | filled[:, 1::2] << 4)
    return pairs.view("<i4").astype(np.int32)
