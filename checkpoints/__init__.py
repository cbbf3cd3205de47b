"""Reading and writing of checkpoints: weights, configurations and tokenizers.

The formats are Hugging Face folders, GGUF files and orbax folders.
"""

from checkpoints.ends import load_ends, load_stop_ids
from checkpoints.loading import (
    fingerprint,
    has_tokenizer,
    load_config,
    load_fingerprint,
    load_generation_config,
    load_params,
    load_tokenizer,
    stored_dtype,
    stored_forms,
    stored_quantization,
)
from checkpoints.orbax import save
from checkpoints.safetensors import parse_layers as parse_layers
from checkpoints.sources import Source, resolve

__all__ = [
    "Source",
    "fingerprint",
    "has_tokenizer",
    "load_config",
    "load_ends",
    "load_fingerprint",
    "load_generation_config",
    "load_params",
    "load_stop_ids",
    "load_tokenizer",
    "parse_layers",
    "resolve",
    "save",
    "stored_dtype",
    "stored_forms",
    "stored_quantization",
]
