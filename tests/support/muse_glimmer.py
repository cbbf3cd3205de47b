"""The published shapes of Muse Glimmer 30B and its assistant."""

from __future__ import annotations

from jaxspec.drafters import dflash
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.rope import Rope

LAYERS = 52
TAPS = (2, 14, 26, 38, 50)
SIZES = {"vocab_size": 202048, "width": 6656, "mlp_width": 19968, "num_heads": 32, "head_dim": 128}
SIZES |= {"max_model_len": 131072, "norm_eps": 1e-5, "rope": Rope(5e5), "tied": False}
TARGET = ModelConfig(
    family="muse_glimmer",
    num_layers=LAYERS,
    num_kv_heads=2,
    windows=(2048, 2048, 2048, None) * (LAYERS // 4),
    unrotated=tuple(range(3, LAYERS, 4)),
    query_scale=3.87 * 128**-0.5,
    logit_scale=26**-0.5,
    logit_soft_cap=20.0,
    post_norm_eps=1e-8,
    **SIZES,
    **FAMILIES["muse_glimmer"].switches(SIZES["width"]),
)


def assistant(target: ModelConfig) -> ModelConfig:
    """The assistant of this target, which may be cut to fewer layers."""
    return dflash.Config(
        family="llama",
        num_layers=5,
        num_kv_heads=8,
        windows=(2049,) * 5,
        qk_norm=True,
        mask_id=201818,
        taps=tuple(min(i, target.num_layers) for i in TAPS),
        target_width=target.width,
        block_size=16,
        bare_target=True,
        **SIZES,
    )
