"""Matrices in 4 bits as checkpoints have them, by the formats' descriptions, for `published_models.publish`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.support.published_models import compressed

FOUR = {"num_bits": 4, "type": "int"}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbours has each place in a word


def words(x: np.ndarray, axis: int, order=range(8)) -> np.ndarray:
    parts = np.moveaxis(x.astype(np.int64), axis, -1).reshape(*np.moveaxis(x, axis, -1).shape[:-1], -1, 8)
    word = sum(parts[..., which] << (4 * place) for place, which in enumerate(order))
    return np.ascontiguousarray(np.moveaxis(word.astype(np.uint32).view(np.int32), -1, axis))


@dataclasses.dataclass(frozen=True)
class FourBits:
    """How a format stores a matrix [O, I]: `form` is what `jaxspec info` reports; `size` inputs share a scale."""

    form: str
    size: int
    config: dict[str, Any]
    zeros: bool = False
    ordered: bool = False

    def stored(self, name: str, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The tensors in which a matrix is stored, and the matrix of what they hold."""
        size, module = self.size or x.shape[1], name.removesuffix(".weight")
        order = np.random.default_rng(x.shape[1]).permutation(x.shape[1]) if self.ordered else np.arange(x.shape[1])
        g_idx = np.empty(x.shape[1], np.int32)
        g_idx[order] = np.arange(x.shape[1]) // size
        parts = x[:, order].reshape(x.shape[0], -1, size)
        low, high = parts.min(-1), parts.max(-1)
        reach = (high - low) / 15 if self.zeros else np.abs(parts).max(-1) / 7
        scale = reach.astype(np.float16).astype(np.float32)
        zero = np.clip(np.rint(-low / scale), 1, 15) if self.zeros else np.full_like(scale, 8)
        each, of_zero = scale[:, g_idx], zero[:, g_idx]
        integers = np.clip(np.rint(x / each) + of_zero, 0, 15).astype(np.uint8)
        return self.tensors(module, integers, zero.astype(np.uint8), scale.astype(np.float16), g_idx), (
            integers - of_zero
        ) * each

    def tensors(self, module: str, integers, zero, scale, g_idx) -> dict[str, np.ndarray]:
        method = self.config["quant_method"]
        if method == "compressed-tensors":
            found = {
                "weight_packed": words(integers, 1),
                "weight_scale": scale,
                "weight_shape": np.asarray(integers.shape, np.int64),
            }
            if self.zeros:
                found["weight_zero_point"] = words(zero, 0)
            if self.ordered:
                found["weight_g_idx"] = g_idx
        elif method == "awq":
            found = {
                "qweight": words(integers.T, 1, AWQ_ORDER),
                "qzeros": words(zero.T, 1, AWQ_ORDER),
                "scales": scale.T,
            }
        else:
            less = self.config.get("checkpoint_format") != "gptq_v2"
            found = {
                "qweight": words(integers.T, 0),
                "qzeros": words(zero.T - less, 1),
                "scales": scale.T,
                "g_idx": g_idx,
            }
        return {f"{module}.{key}": value for key, value in found.items()}


def gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FORMATS = {
    "W4A16": FourBits("int4", 128, compressed("pack-quantized", FOUR, "group", group_size=128)),
    "W4A16 by output": FourBits("int4 in groups of all inputs", 0, compressed("pack-quantized", FOUR, "channel")),
    "W4A16_ASYM": FourBits(
        "int4_asym_32", 32, compressed("pack-quantized", FOUR, "group", group_size=32, symmetric=False), zeros=True
    ),
    "W4A16 actorder": FourBits(
        "int4_64", 64, compressed("pack-quantized", FOUR, "group", group_size=64, actorder="group"), ordered=True
    ),
    "awq": FourBits("int4_asym_64", 64, AWQ, zeros=True),
    "gptq": FourBits("int4_64", 64, gptq(sym=True)),
    "gptq_v2": FourBits("int4_asym_64", 64, gptq(checkpoint_format="gptq_v2"), zeros=True),
    "gptq desc_act": FourBits("int4_asym_64", 64, gptq(desc_act=True), zeros=True, ordered=True),
}
