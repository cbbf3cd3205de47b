"""Makes tests/golden/published: what the compressed-tensors library (0.20) stores of a matrix, by scheme.

    pip install torch compressed-tensors
    python -m tests.golden.make_published

Each folder holds a config.json with the library's quantization_config, the tensors of one module, and the matrix that
the library reads back, as `dequantised`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, preset_name_to_scheme
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "published"
MODULE = "model.layers.0.mlp.down_proj"
SHAPE = 6, 256
FORMATS = {
    "W8A16": "pack-quantized",
    "W8A16 by output": "pack-quantized",
    "W8A8": "int-quantized",
    "FP8": "float-quantized",
    "FP8_DYNAMIC": "float-quantized",
    "FP8_BLOCK": "float-quantized",
}


def scales(x: torch.Tensor, strategy: str, most: float) -> torch.Tensor:
    rows, columns = {"tensor": SHAPE, "channel": (1, SHAPE[1]), "group": (1, 128), "block": (128, 128)}[strategy]
    parts = [[part.abs().max() for part in row.split(columns, 1)] for row in x.split(rows)]
    scale = torch.tensor(parts) / most
    return scale.reshape(1) if strategy == "tensor" else scale


def main() -> None:
    for name, layout in FORMATS.items():
        torch.manual_seed(0)
        x = torch.randn(SHAPE) * torch.logspace(-2, 2, SHAPE[0])[:, None]
        scheme = preset_name_to_scheme(name.split()[0], ["Linear"])
        if "by output" in name:
            scheme.weights = QuantizationArgs(num_bits=8, strategy="channel")
        compressor = BaseCompressor.get_value_from_registry(layout)
        scale = scales(x, scheme.weights.strategy, 127 if scheme.weights.type == "int" else 448)
        stored = compressor.compress({"weight": x, "weight_scale": scale}, scheme)
        config = QuantizationConfig(
            config_groups={"group_0": scheme}, format=layout, quantization_status="compressed", ignore=["lm_head"]
        )
        tensors = {f"{MODULE}.{key}": value.contiguous() for key, value in stored.items()}
        tensors["dequantised"] = compressor.decompress(stored, scheme)["weight"].float()
        folder = FOLDER / name.lower().replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        raw = {"quantization_config": json.loads(config.model_dump_json())}
        (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
