"""Makes tests/golden/four_bits/w4a16_act_order: 4 bits with `actorder="group"`, which compressed-tensors wrote once.

pip install torch compressed-tensors==0.10.2 transformers    # later releases have no groups of scattered inputs
python -m tests.golden.make_act_order
"""

from __future__ import annotations

import json

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

from tests.golden.make_four_bits import GROUP, INPUTS, OUTPUTS, write


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(OUTPUTS, INPUTS) * torch.logspace(-2, 2, OUTPUTS)[:, None] + 0.3
    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    scheme.weights = args = scheme.weights.model_copy(update={"group_size": GROUP, "actorder": "group"})
    groups = (torch.arange(INPUTS) // GROUP)[torch.randperm(INPUTS)].to(torch.int32)
    scale = torch.stack([x[:, groups == n].abs().amax(1) / 7 for n in range(INPUTS // GROUP)], 1).half().float()
    compressor = BaseCompressor.load_from_registry("pack-quantized")
    zero = torch.zeros_like(scale, dtype=torch.int8)
    stored = compressor.compress_weight(x, scale, args, zero_point=zero, g_idx=groups)
    stored |= {"weight_scale": scale, "weight_g_idx": groups}
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format="pack-quantized", quantization_status="compressed", ignore=["lm_head"]
    )
    read = compressor.decompress_weight(stored, args)
    write("w4a16_act_order", json.loads(config.model_dump_json()), stored, read)


if __name__ == "__main__":
    main()
