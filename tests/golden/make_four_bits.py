"""Makes tests/golden/four_bits: a matrix in 4 bits as other libraries store it, by scheme, and as they read it back.

    pip install torch compressed-tensors        # 0.20
    pip download --no-deps autoawq auto-gptq    # 0.2.9 and 0.7.1; unpack both into a folder, here PACKAGES
    python -m tests.golden.make_four_bits PACKAGES

AutoAWQ's `packing_utils.py` and AutoGPTQ's `qlinear_cuda.py` need torch alone.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "four_bits"
MODULE = "model.layers.0.mlp.down_proj"
OUTPUTS, INPUTS, GROUP = 32, 256, 64
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # as in awq/modules/linear/gemm.py, which needs a GPU library to be imported


def of_file(path: Path) -> Any:
    """The module in a file, without its package."""
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grid(x: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [O, N] of the groups of inputs."""
    parts = [x[:, groups == n] for n in range(int(groups.max()) + 1)]
    low, high = (torch.stack([f(p, 1).values for p in parts], 1) for f in (torch.min, torch.max))
    scale = ((high - low) / 15).half().float()
    return scale, torch.round(-low / scale).clamp(1, 15)


def write(name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], dequantised: torch.Tensor) -> None:
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    stored = {f"{MODULE}.{key}": value.contiguous() for key, value in tensors.items()}
    save_file(stored | {"dequantised": dequantised.float().contiguous()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}, indent=1) + "\n")


def compressed(name: str, preset: str, x: torch.Tensor, **args: Any) -> None:
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.weights = scheme.weights.model_copy(update=args)
    groups = torch.arange(INPUTS) // (args.get("group_size") or INPUTS)
    parts = [x[:, groups == n] for n in range(int(groups.max()) + 1)]
    scale, zero = torch.stack([p.abs().amax(1) / 7 for p in parts], 1).half().float(), None
    if not scheme.weights.symmetric:
        scale, zero = grid(x, groups)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    given = {"weight": x, "weight_scale": scale}
    if zero is not None:
        given["weight_zero_point"] = (zero - 8).to(torch.int8)
    stored = {key: value.contiguous() for key, value in compressor.compress(given, scheme).items()}
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format="pack-quantized", quantization_status="compressed", ignore=["lm_head"]
    )
    write(name, json.loads(config.model_dump_json()), stored, compressor.decompress(dict(stored), scheme)["weight"])


def awq(packages: Path, x: torch.Tensor) -> None:
    scale, zero = grid(x, torch.arange(INPUTS) // GROUP)
    each = [t.repeat_interleave(GROUP, 1) for t in (scale, zero)]
    integers = (torch.round(x / each[0]) + each[1]).clamp(0, 15).to(torch.int32).T

    def words(t: torch.Tensor) -> torch.Tensor:
        columns = [t[:, AWQ_ORDER[i] :: 8] << (4 * i) for i in range(8)]
        return torch.stack(columns).sum(0).to(torch.int32)

    stored = {"qweight": words(integers), "qzeros": words(zero.T.to(torch.int32)), "scales": scale.T.half()}
    found = of_file(packages / "autoawq-0.2.9/awq/utils/packing_utils.py").dequantize_gemm(
        stored["qweight"], stored["qzeros"], scale.T.contiguous(), 4, GROUP
    )
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    write("awq", config, stored, found.T)


def gptq(packages: Path, name: str, x: torch.Tensor, *, desc_act: bool, sym: bool) -> None:
    linear = of_file(packages / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py").QuantLinear
    groups = torch.arange(INPUTS) // GROUP
    groups = groups[torch.randperm(INPUTS)] if desc_act else groups
    scale, zero = grid(x, groups)
    if sym:
        parts = [x[:, groups == n] for n in range(int(groups.max()) + 1)]
        scale = torch.stack([p.abs().amax(1) / 7 for p in parts], 1).half().float()
        zero = torch.full_like(scale, 8)
    x = (torch.round(x / scale[:, groups]).clamp(-zero[:, groups], 15 - zero[:, groups])) * scale[:, groups]
    dense = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    dense.weight.data = x
    packed = linear(4, GROUP, INPUTS, OUTPUTS, False, weight_dtype=torch.float32)
    packed.autogptq_cuda_available = False
    packed.pack(dense, scale, zero.clone(), groups.to(torch.int32))
    stored = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": desc_act, "sym": sym}
    write(name, config, stored | {"scales": stored["scales"].half()}, packed(torch.eye(INPUTS)).T)


def main() -> None:
    packages = Path(sys.argv[1])
    sys.modules.setdefault("transformers", types.ModuleType("transformers"))  # AutoGPTQ names one class of it
    pytorch_utils: Any = types.ModuleType("transformers.pytorch_utils")
    pytorch_utils.Conv1D = type(None)
    sys.modules["transformers"].pytorch_utils = pytorch_utils  # type: ignore[attr-defined]
    torch.manual_seed(0)
    x = torch.randn(OUTPUTS, INPUTS) * torch.logspace(-2, 2, OUTPUTS)[:, None] + 0.3
    compressed("w4a16", "W4A16", x, group_size=128)
    compressed("w4a16_asym", "W4A16_ASYM", x, group_size=32)
    compressed("w4a16_by_output", "W4A16", x, group_size=None, strategy="channel")
    awq(packages, x)
    gptq(packages, "gptq", x, desc_act=False, sym=True)
    gptq(packages, "gptq_asym", x, desc_act=False, sym=False)
    gptq(packages, "gptq_desc_act", x, desc_act=True, sym=False)


if __name__ == "__main__":
    main()
