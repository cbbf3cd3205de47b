"""A tiny random model as a Hugging Face folder: config.json, model.safetensors and a tokenizer trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = """The quick brown fox jumps over the lazy dog, and the dog sleeps on. Whatever the fox does, the dog dreams of
rivers and hills; naïve cafés serve über-strong coffee. One, two, three, four: count the words and count them again.
def total(items): return sum(item.price * item.count for item in items)
"""
SPECIAL = ["<unk>", "<s>", "</s>", "<user>", "<bot>"]
BOS, EOS = 1, 2
CHAT_TEMPLATE = (
    "<s>{{ how }}{% for m in messages %}<user>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def write_tokenizer(
    folder: Path,
    *,
    vocab_size: int = 320,
    text: str = TEXT,
    chat: bool = True,
    marks: tuple[str, ...] = (),
    special: bool = False,
) -> None:
    """A byte-level BPE that puts <s> in front. marks: further tokens, which texts show unless they are special."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(marks), special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=special) for mark in marks])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": False}
    settings = (
        names | {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"chat_template": CHAT_TEMPLATE} if chat else {})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    width: int = 32,
    kv_heads: int = 2,
    mlp: int = 48,
    head_dim: int = 8,
    vocab_size: int = 320,
    rope_theta: float = 10000.0,
    chat: bool = True,
    text: str = TEXT,
) -> Path:
    """A random Llama of `layers` layers. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    heads = 4
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    weight = lambda *shape: (rng.standard_normal(shape) * 2.0 * shape[-1] ** -0.5).astype(np.float32)
    ones = np.ones(width, np.float32)
    tensors = {"model.embed_tokens.weight": weight(vocab_size, width), "lm_head.weight": weight(vocab_size, width)}
    tensors["model.norm.weight"] = ones.copy()
    for i in range(layers):
        block = {
            "self_attn.q_proj": weight(heads * head_dim, width),
            "self_attn.k_proj": weight(kv_heads * head_dim, width),
            "self_attn.v_proj": weight(kv_heads * head_dim, width),
            "self_attn.o_proj": weight(width, heads * head_dim),
            "mlp.gate_proj": weight(mlp, width),
            "mlp.up_proj": weight(mlp, width),
            "mlp.down_proj": weight(width, mlp),
            "input_layernorm": ones.copy(),
            "post_attention_layernorm": ones.copy(),
        }
        tensors |= {f"model.layers.{i}.{name}.weight": value for name, value in block.items()}
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder, vocab_size=vocab_size, chat=chat, text=text)
    return folder
