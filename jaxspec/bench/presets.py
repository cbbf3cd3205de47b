"""Shapes of public models, for random weights. Speed depends on the shapes, not on the values of the weights."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from checkpoints.rope_scaling import llama3_factors
from jaxspec.common.errors import UserError
from jaxspec.drafters import dflash, eagle, eagle3, medusa, mtp
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import abstract_params
from jaxspec.models.families import FAMILIES
from jaxspec.models.rope import Rope
from jaxspec.parallel.placement import make_placement

# Names of the columns of TABLE, whose values are from public config.json files (but for tiny and tiny-draft).
# stretch: factor of Llama 3's scaled rotary embedding, 1 for models without it.
COLUMNS = (
    *("family", "vocab_size", "num_layers", "width", "mlp_width", "num_heads", "num_kv_heads", "head_dim"),
    *("max_model_len", "theta", "tied", "stretch"),
)
TABLE: dict[str, tuple[Any, ...]] = {
    "qwen3-0.6b": ("qwen3", 151936, 28, 1024, 3072, 16, 8, 128, 40960, 1e6, True, 1),
    "qwen3-1.7b": ("qwen3", 151936, 28, 2048, 6144, 16, 8, 128, 40960, 1e6, True, 1),
    "qwen3-4b": ("qwen3", 151936, 36, 2560, 9728, 32, 8, 128, 40960, 1e6, True, 1),
    "qwen3-8b": ("qwen3", 151936, 36, 4096, 12288, 32, 8, 128, 40960, 1e6, False, 1),
    "qwen3-14b": ("qwen3", 151936, 40, 5120, 17408, 40, 8, 128, 40960, 1e6, False, 1),
    "qwen3-32b": ("qwen3", 151936, 64, 5120, 25600, 64, 8, 128, 40960, 1e6, False, 1),
    "llama-3.2-1b": ("llama", 128256, 16, 2048, 8192, 32, 8, 64, 131072, 5e5, True, 32),
    "llama-3.1-8b": ("llama", 128256, 32, 4096, 14336, 32, 8, 128, 131072, 5e5, False, 8),
    "smollm2-135m": ("llama", 49152, 30, 576, 1536, 9, 3, 64, 8192, 1e5, True, 1),
    "tiny": ("qwen3", 512, 2, 64, 128, 4, 2, 16, 2048, 1e4, False, 1),
    "tiny-draft": ("qwen3", 512, 1, 32, 64, 2, 1, 16, 2048, 1e4, True, 1),
}
NORM_EPS = {"qwen3": 1e-6, "llama": 1e-5}


def preset(name: str, target: ModelConfig | None = None) -> ModelConfig:
    """Return the model configuration of a preset (a name for the shapes of a public model).

    target: the target if the preset is for a draft. A head takes its shapes from the target's.

    Raises: UserError for an unknown name. The message suggests the most similar one.
    """
    if target and name in HEADS:
        return HEADS[name](target)
    if name not in TABLE:
        near = difflib.get_close_matches(name, TABLE, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"--preset {name!r} is unknown{hint}: use one of {', '.join(TABLE)}, or target+draft of them")
    fields = dict(zip(COLUMNS, TABLE[name], strict=True))
    theta = fields.pop("theta")
    stretch = fields.pop("stretch")
    scaling = {"factor": stretch, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    factors = llama3_factors(scaling, theta, fields["head_dim"]) if stretch != 1 else ()
    return ModelConfig(
        **fields,
        windows=(None,) * fields["num_layers"],
        rope=Rope(theta, factors),
        norm_eps=NORM_EPS[fields["family"]],
        **FAMILIES[fields["family"]].switches(fields["width"]),
    )


def eagle3_head(target: ModelConfig) -> ModelConfig:
    """Return the configuration of a published EAGLE-3 head: one layer that reads the inputs of three target layers."""
    layers = target.num_layers
    taps = (min(2, layers), layers // 2, max(layers - 3, 0))
    few = min(32000, target.vocab_size)  # number of ids in the published heads' reduced vocabulary
    return eagle3.Config(**layers_like(target, 1), taps=taps, target_width=target.width, reduced_vocab_size=few)


def dflash_head(target: ModelConfig) -> ModelConfig:
    """Return the configuration of z-lab's DFlash heads: five layers that read the inputs of five target layers.

    Their blocks have 16 tokens.
    """
    taps = tuple(min(2 + round(i * (target.num_layers - 5) / 4), target.num_layers) for i in range(5))
    layers = layers_like(target, 5) | {"qk_norm": True, "mask_id": 0}
    return dflash.Config(**layers, taps=taps, target_width=target.width, block_size=16)


def layers_like(target: ModelConfig, count: int) -> dict[str, Any]:
    """Return the configuration fields of `count` Llama layers with the target's sizes."""
    sizes = ("vocab_size", "width", "mlp_width", "num_heads", "num_kv_heads", "head_dim", "max_model_len")
    same = {name: getattr(target, name) for name in (*sizes, "rope", "norm_eps")}
    return same | {"family": "llama", "num_layers": count, "windows": (None,) * count, "tied": False}


def like(target: ModelConfig, count: int = 1, **own: Any) -> dict[str, Any]:
    """Return the configuration fields of `count` layers of the target's own family, with the fields `own` replaced."""
    return vars(target) | {"num_layers": count, "windows": (None,) * count, "tied": False} | own


# For each drafting method, the function that returns the configuration of its published heads for a target.
HEADS: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "eagle": lambda target: eagle.Config(**layers_like(target, 1)),
    "eagle3": eagle3_head,
    "mtp": lambda target: mtp.Config(**like(target), target_layers=target.num_layers),
    "medusa": lambda target: medusa.Config(**like(target), num_drafts=5),
    "dflash": dflash_head,
}


def split(names: str) -> tuple[str, str | None]:
    """Split "target+draft" or "target" into the names of target and draft."""
    target, _, draft = names.partition("+")
    return target, draft or None


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, computed from the shapes alone. A tied embedding counts once."""
    return sum(a.size for a in abstract_params(config, "bfloat16", make_placement()).values())
