"""Checkpoint files for tests: the golden models as GGUF, in shards, with something wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints
from jaxspec.models import families
from jaxspec.models.decoder import abstract_params
from jaxspec.parallel.placement import make_placement
from tests.golden.families import FAMILIES, FOLDER

# Golden model -> family as which its GGUF file is read. (A Mistral file says "llama" and does not tell its window.
# `test_gemma4_gguf` writes files of Gemma 4.)
ARCHITECTURES = {
    name: family for name, (family, *_) in FAMILIES.items() if family in families.GGUF and family != "gemma4"
} | {"olmo3": "olmo2"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "self_attn.gate_proj": "attn_gate",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def hf(folder: Path) -> checkpoints.Source:
    return checkpoints.Source("hf", folder, folder.name)


def load(path: Path, dtype: str = "float32", devices: int = 1):
    source = checkpoints.resolve(str(path))
    config = checkpoints.load_config(source)
    return config, checkpoints.load_params(source, config, abstract_params(config, dtype, make_placement(devices)))


def assert_same(ours: dict[str, jax.Array], theirs: dict[str, jax.Array], **tolerance: float) -> None:
    assert set(ours) == set(theirs)
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype, name
        np.testing.assert_allclose(
            np.asarray(ours[name], np.float32), np.asarray(array, np.float32), err_msg=name, **({"rtol": 0} | tolerance)
        )


def fails(kind: type[Exception], *words: str):
    """The block raises `kind` with a message of one line that holds all the words."""
    return pytest.raises(kind, check=lambda e: "\n" not in str(e) and all(word in str(e) for word in words))


def interleave(x: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of llama models: row (half, pair) of a head becomes (pair, half)."""
    out = np.empty_like(x)
    size = len(x) // heads
    for row in range(len(x)):
        head, within = divmod(row, size)
        half, pair = divmod(within, size // 2)
        out[head * size + 2 * pair + half] = x[row]
    return out


def config_of(family: str) -> dict[str, Any]:
    """The config.json of a golden model's text decoder."""
    raw = json.loads((FOLDER / family / "config.json").read_text())
    return raw.get("text_config", raw)


def tensors_of(family: str) -> dict[str, np.ndarray]:
    """The golden model's tensors as a GGUF file holds them, float32."""
    raw, architecture, out = config_of(family), ARCHITECTURES[family], {}
    for name, x in load_file(FOLDER / family / "model.safetensors").items():
        x = x.astype(np.float32)
        name = name.replace("model.language_model.", "model.")
        if "vision" in name:
            continue
        entry = families.FAMILIES[architecture]
        if entry.norm_plus_one and "norm" in name and not (entry.whole_last_norm and name == "model.norm.weight"):
            x = x + 1
        if families.GGUF[architecture].interleaved and (".q_proj" in name or ".k_proj" in name):
            x = interleave(x, raw["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"])
        after = "post_attention_norm" if entry.sandwich_norm else "ffn_norm"
        for theirs, ours in (NAMES | {"post_attention_layernorm": after}).items():
            name = name.replace(theirs, ours)
        out[name] = x
    if family == "llama3":
        factors = checkpoints.load_config(checkpoints.resolve(str(FOLDER / family))).rope.factors
        out["rope_freqs.weight"] = np.asarray(factors, np.float32)
    for i in range(raw["num_hidden_layers"] if architecture == "muse_glimmer" else 0):
        out[f"blk.{i}.attn_q_norm.weight"] = np.full(raw["head_dim"], raw["qk_scale_factor"], np.float32)
        out[f"blk.{i}.attn_k_norm.weight"] = np.ones(raw["head_dim"], np.float32)
    for key in ("long_factor", "short_factor"):
        if key in raw["rope_parameters"]:
            out[f"rope_factors_{key[:-7]}.weight"] = np.asarray(raw["rope_parameters"][key], np.float32)
    return out


def write_gguf(
    path: Path,
    family: str,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokenizer: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **meta: Any,
) -> Path:
    """A GGUF file of a golden model; matrices whose rows divide into blocks of `kind` are quantised to it."""
    raw = config_of(family)
    architecture, gemma = ARCHITECTURES[family], family == "gemma3"
    writer = gguf.GGUFWriter(path, meta.pop("architecture", families.GGUF[architecture].architecture or architecture))
    heads = raw["num_attention_heads"]
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw.get("head_dim") or raw["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    ropes = raw["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        for key, add in {
            "factor": writer.add_rope_scaling_factor,
            "original_max_position_embeddings": writer.add_rope_scaling_orig_ctx_len,
            "attention_factor": writer.add_rope_scaling_yarn_attn_factor,
            "beta_fast": writer.add_rope_scaling_yarn_beta_fast,
            "beta_slow": writer.add_rope_scaling_yarn_beta_slow,
            "mscale_all_dim": writer.add_rope_scaling_yarn_log_mul,
            "llama_4_scaling_beta": writer.add_attn_temperature_scale,
        }.items():
            if rope.get(key) is not None:
                add(rope[key])
    if share := raw.get("partial_rotary_factor"):
        writer.add_rope_dimension_count(int(raw["hidden_size"] // heads * share))
    if original := raw.get("original_max_position_embeddings"):
        stretch = raw["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
    if architecture == "phi3":
        writer.add_sliding_window(raw["sliding_window"] or 0)
    if "sliding_attention" in raw.get("layer_types", ()) and architecture != "phi3":
        writer.add_sliding_window(raw["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in raw["layer_types"]])
    if gemma:
        writer.add_float32("gemma3.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(ropes["full_attention"]["factor"])
    for key, add in {
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "output_multiplier": writer.add_logit_scale,
    }.items():
        if key in raw:
            add(raw[key])
    if cap := raw.get("final_logit_softcapping") if not gemma else None:
        writer.add_final_logit_softcapping(cap)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for key, value in (tokenizer or {}).items():
        add = {str: writer.add_string, bool: writer.add_bool, list: writer.add_array, int: writer.add_uint32}
        add[type(value)](f"tokenizer.{key}", value)
    for name, x in (tensors_of(family) if tensors is None else tensors).items():
        block = gguf.GGML_QUANT_SIZES[kind][0]
        if x.ndim > 1 and x.shape[-1] % block == 0:
            writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, x)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what the writer was given to its GGUF file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rewrite(folder: Path, family: str, change=lambda tensors: tensors, **config: Any) -> Path:
    """A copy of a golden folder with its tensors changed, and entries of its config.json replaced."""
    folder.mkdir(exist_ok=True)
    raw = json.loads((FOLDER / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    save_file(change(load_file(FOLDER / family / "model.safetensors")), folder / "model.safetensors")
    return folder


def shard(folder: Path, family: str, count: int = 3) -> Path:
    """A copy of a golden folder in `count` shards with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((FOLDER / family / "config.json").read_bytes())
    tensors, weight_map = load_file(FOLDER / family / "model.safetensors"), {}
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::count]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@dataclasses.dataclass(frozen=True)
class Value:
    """A GGUF value as it stands in the file, whether or not it makes sense."""

    kind: int
    data: bytes

    @classmethod
    def of(cls, value: Any) -> Value:
        if isinstance(value, Value):
            return value
        if isinstance(value, list):
            items = [cls.of(v) for v in value] or [cls.of(0)]
            return cls(9, struct.pack("<IQ", items[0].kind, len(value)) + b"".join(v.data for v in items[: len(value)]))
        if isinstance(value, bool):
            return cls(7, struct.pack("<B", value))
        if isinstance(value, int):
            return cls(4, struct.pack("<I", value)) if 0 <= value < 2**32 else cls(11, struct.pack("<q", value))
        if isinstance(value, float):
            return cls(6, struct.pack("<f", value))
        return cls(8, gguf_string(value))


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def raw_gguf(
    path: Path,
    meta: list[tuple[str, Any]],
    tensors: list[tuple[str, tuple[int, ...], int, int]],
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    size: int = 1 << 16,
) -> Path:
    """A GGUF file written without any check. tensors: (name, dimensions, type, offset); size: bytes of weights."""
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(meta))))
    for key, value in meta:
        head += gguf_string(key) + struct.pack("<I", Value.of(value).kind) + Value.of(value).data
    for name, dims, kind, offset in tensors:
        head += gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    head += bytes(-len(head) % 4)
    path.write_bytes(head + b"\0\0\x80?" * (size // 4))  # ones in float32
    return path
