"""One tiny model a family, chosen so that a wrong head order, window, rotary base or norm changes the logits.

Head sizes stand apart from width / heads, sliding windows and rotary contexts are shorter than the 48 positions that
are compared, some are tied, most group their heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxspec.models import families

FOLDER = Path(__file__).parent
POSITIONS = 48
SHARED = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-2,  # large enough to count
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Name -> (family, configuration of the transformers model, the dtype that its file stores).
GEMMA4_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
}
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama2": ("llama", {"num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": False}, "float32"),
    "llama3": (
        "llama",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        "bfloat16",
    ),
    "mistral": ("mistral", {"head_dim": 8, "sliding_window": 20, "tie_word_embeddings": False}, "float16"),
    "qwen2": ("qwen2", {"hidden_size": 64, "tie_word_embeddings": True}, "bfloat16"),
    "qwen3": ("qwen3", {"num_attention_heads": 6, "head_dim": 24, "tie_word_embeddings": False}, "bfloat16"),
    "gemma3": (
        "gemma3",
        {
            "head_dim": 16,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 12,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
            },
        },
        "float32",
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
        },
        "bfloat16",
    ),
    "phi3": ("phi3", {"hidden_size": 64, "sliding_window": 20, "tie_word_embeddings": False}, "float16"),
    "phi4-mini": (
        "phi3",
        {
            "hidden_size": 64,
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
            },
        },
        "bfloat16",
    ),
    "smollm3": (
        "smollm3",
        {"num_hidden_layers": 4, "num_attention_heads": 6, "tie_word_embeddings": True},  # the fourth without rotary
        "bfloat16",
    ),
    "olmo2": ("olmo2", {"head_dim": 16, "tie_word_embeddings": False}, "float32"),
    "olmo3": (
        "olmo3",
        {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 12,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "attention_factor": 1.2,
                    "beta_fast": 4.0,
                    "beta_slow": 1.0,
                },
            },
        },
        "bfloat16",
    ),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.4,
            },
        },
        "bfloat16",
    ),
    "gemma4": (  # as E2B and E4B
        "gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "final_logit_softcapping": 4.0,
            "sliding_window": 12,
            "rope_parameters": GEMMA4_ROPES,
        },
        "bfloat16",
    ),
    "gemma4_dense": (  # as 31B
        "gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 4.0,
            "sliding_window": 12,
            "rope_parameters": GEMMA4_ROPES,
        },
        "bfloat16",
    ),
    "muse_glimmer": (
        "muse_glimmer",
        {
            "head_dim": 16,
            "num_hidden_layers": 5,  # the first and the last with full attention and without rotary embedding
            "sliding_window": 12,
            "qk_scale_factor": 1.7,
            "output_multiplier": 0.6,
            "post_norm_eps": 0.3,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "tie_word_embeddings": False,
        },
        "bfloat16",
    ),
}
# The least of images' part, of a family whose models all have one.
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 2}


def torch_class(config):
    """(configuration, model) for the text of this configuration: a multimodal model if transformers has no other."""
    import transformers

    alone = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in alone:
        return config, alone[type(config)]
    entry = next(entry for entry in families.FAMILIES.values() if entry.model_type == config.model_type)
    whole = transformers.CONFIG_MAPPING[entry.multimodal]
    both = whole(text_config=config, vision_config=VISION, out_hidden_size=64, projector_hidden_size=8)
    return both, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[whole]


def randomise(model, generator) -> None:
    """Give a transformers model random weights: matrices that keep the size of rows, and norms around 1."""
    import torch

    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if weight.ndim == 1 else noise * 1.5 * weight.shape[1] ** -0.5)


def torch_model(name: str, seed: int, **changes):
    """A random transformers model of FAMILIES in float32, its weights rounded to the dtype that is stored.

    changes: options of its configuration in place of those in FAMILIES.
    """
    import torch
    import transformers

    family, options, dtype = FAMILIES[name]
    entry = families.FAMILIES[family]
    config, kind = torch_class(transformers.CONFIG_MAPPING[entry.model_type](**SHARED | options | changes))
    config._attn_implementation = "eager"
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:  # logits of size one or more
                value = noise * (weight.shape[1] ** -0.5 * (1.5 if "embed" not in tensor else 4.0))
            else:  # norms and biases: far enough from their neutral value to be missed
                last = entry.whole_last_norm and tensor.endswith("model.norm.weight")
                centre = 0.0 if (entry.norm_plus_one and not last) or tensor.endswith("bias") else 1.0
                value = centre + 0.3 * noise
            weight.copy_(value.to(getattr(torch, dtype)).float())
        for tensor, factor in model.named_buffers():
            if tensor.endswith("layer_scalar"):
                value = 1.0 + 0.3 * torch.randn(factor.shape, generator=generator)
                factor.copy_(value.to(getattr(torch, dtype)).float())
    return model


def save_model(model, family: str, folder: Path) -> None:
    """config.json and model.safetensors, in the family's stored dtype, as transformers writes them."""
    import copy

    import torch

    copy.deepcopy(model).to(getattr(torch, FAMILIES[family][2])).save_pretrained(folder)


def torch_logits(model, tokens):
    """tokens i64[B, T] -> logits f32[B, T, V]."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens), use_cache=False).logits.float().numpy()
