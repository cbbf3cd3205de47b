"""Tiny models as they are published in 8 bits: folders in the formats of compressed-tensors and of quant_method fp8."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from checkpoints.eight_bit_tensors import float8_slices

E4M3 = jnp.dtype("float8_e4m3fn")
INT, FLOAT = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}


@dataclasses.dataclass(frozen=True)
class Format:
    """How a format stores a matrix [O, I].

    form: name of the form, as `jaxspec info` reports it.
    block: rows and columns that share a scale, 0 for all of them.
    config: quantization_config.
    flat: whether scales are stored without axes of size 1.
    """

    form: str
    block: tuple[int, int]
    config: dict[str, Any]
    packed: bool = False
    scale: str = "_scale"
    flat: bool = False
    beside: tuple[str, ...] = ()

    def stored(self, name: str, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return stored(name, x, self)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.int8) if self.form.startswith("int8") else E4M3


def compressed(
    layout: str, weights: dict, strategy: str, activations: dict | None = None, **more: Any
) -> dict[str, Any]:
    args = weights | {"strategy": strategy, "symmetric": True, "dynamic": False} | more
    group = {"targets": ["Linear"], "weights": args, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def blocks(size: list[int] | None) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": size,
        "modules_to_not_convert": ["lm_head"],
    }


STATIC = FLOAT | {"strategy": "tensor", "dynamic": False}
FORMATS = {
    "W8A16": Format("int8", (1, 0), compressed("pack-quantized", INT, "channel"), packed=True),
    "W8A16 groups": Format(
        "int8_block", (1, 128), compressed("pack-quantized", INT, "group", group_size=128), packed=True
    ),
    "W8A16 int": Format("int8", (1, 0), compressed("int-quantized", INT, "channel")),
    "W8A8": Format("int8", (1, 0), compressed("int-quantized", INT, "channel", INT | TOKEN)),
    "W8A8 tensor": Format(
        "int8 in blocks of all inputs and all outputs", (0, 0), compressed("int-quantized", INT, "tensor", INT | TOKEN)
    ),
    "FP8": Format(
        "fp8_tensor", (0, 0), compressed("float-quantized", FLOAT, "tensor", STATIC), flat=True, beside=("input_scale",)
    ),
    "FP8_DYNAMIC": Format("fp8", (1, 0), compressed("float-quantized", FLOAT, "channel", FLOAT | TOKEN)),
    "FP8_BLOCK": Format(
        "fp8_block",
        (128, 128),
        compressed("float-quantized", FLOAT, "block", FLOAT | TOKEN, block_structure=[128, 128]),
    ),
    "fp8 blocks": Format("fp8_block", (128, 128), blocks([128, 128]), scale="_scale_inv"),
    "fp8 tensor": Format(
        "fp8_tensor", (0, 0), blocks(None), scale="_scale_inv", flat=True, beside=("activation_scale",)
    ),
}


def expanded(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """The scale of each element of a matrix of this shape."""
    rows, columns = (b or size for b, size in zip(block, shape, strict=True))
    return scale.repeat(rows, 0).repeat(columns, 1)[: shape[0], : shape[1]]


def stored(name: str, x: np.ndarray, how: Format) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors in which a matrix is stored, and the matrix of what they hold."""
    rows, columns = (b or size for b, size in zip(how.block, x.shape, strict=True))
    grid = [
        [np.abs(x[i : i + rows, j : j + columns]).max() for j in range(0, x.shape[1], columns)]
        for i in range(0, x.shape[0], rows)
    ]
    scale = (np.asarray(grid) / (127 if how.dtype == np.int8 else 448)).astype(jnp.bfloat16)
    each = expanded(scale.astype(np.float32), x.shape, how.block)
    values = (np.rint(x / each).clip(-127, 127) if how.dtype == np.int8 else (x / each).clip(-448, 448)).astype(
        how.dtype
    )
    tensors = {name + how.scale: scale.reshape(-1)[:1] if how.flat else scale, name: values}
    if how.packed:
        offset = np.pad(values.view(np.uint8) + np.uint8(128), ((0, 0), (0, -x.shape[1] % 4)))
        tensors[f"{name}_packed"] = np.ascontiguousarray(offset).view(np.int32)
        tensors[f"{name}_shape"] = np.asarray(x.shape, np.int64)
        del tensors[name]
    for other in how.beside:
        tensors[name.replace("weight", other)] = np.float32([0.5])
    return tensors, values.astype(np.float32) * each


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, as they are stored."""
    path = folder / "model.safetensors"
    float8 = float8_slices(path)
    with safe_open(path, framework="np") as file:
        return {name: float8[name][...] if name in float8 else file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def publish(folder: Path, new: Path, how: Any, *, heads: bool = False, **config: Any) -> tuple[Path, Path]:
    """Two copies of a model's folder: in 8 bits, the output head only with `heads`, and dequantised in float32.

    how: an entry of FORMATS, here or in `four_bit_models`.
    """
    dense = new.with_name(new.name + "-dense")
    for copy in (new, dense):
        shutil.copytree(folder, copy)
    quantised, whole = {}, {}
    for name, x in load_file(folder / "model.safetensors").items():
        if x.ndim == 2 and "embed" not in name and (heads or "lm_head" not in name):
            parts, whole[name] = how.stored(name, x.astype(np.float32))
            quantised |= parts
        else:
            quantised[name] = whole[name] = x
    save_file({name: np.ascontiguousarray(x) for name, x in quantised.items()}, new / "model.safetensors")
    save_file(whole, dense / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (new / "config.json").write_text(json.dumps(raw | {"quantization_config": how.config | config}))
    return new, dense
