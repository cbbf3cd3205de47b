"""Whatever the format: configuration, weights, tokenizer and stop ids of a Source."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax

from checkpoints import gguf, orbax, safetensors
from checkpoints.gguf_tokenizer import build_tokenizer
from checkpoints.library import transformers
from checkpoints.reading import read_json, told
from checkpoints.sources import Source
from jaxspec.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.limits import short, token_ids
from jaxspec.models.parameters import Parameter

FORMATS: Mapping[str, ModuleType] = {"hf": safetensors, "gguf": gguf, "orbax": orbax}
GENERATION_CONFIG = "generation_config.json"


def load_config(source: Source) -> ModelConfig:
    """The model's configuration.

    Raises: UnsupportedError for an unsupported architecture; FileNotFoundError or UserError, naming the file, where
      it is missing, truncated or damaged.
    """
    return FORMATS[source.kind].load_config(source.path)


def load_params(
    source: Source, config: ModelConfig, abstract: Mapping[str, Parameter], *, progress: bool = True
) -> dict[str, jax.Array]:
    """The parameters, read slice by slice onto their devices.

    Args:
      abstract: name -> parameter, with dtype and sharding, as `jaxspec.models.decoder.abstract_params` gives them.
      progress: shows on standard error how far it is, where loading takes its time.

    Raises: UserError naming the tensor that is missing, extra or of a wrong shape, or the file that is truncated;
      FileNotFoundError naming a missing shard; UnsupportedError for a dtype or quantisation that is not read.
    """
    return FORMATS[source.kind].load_params(source.path, config, abstract, progress=progress)


def stored_dtype(source: Source) -> str:
    """The float dtype of most of the weights; bfloat16 where they are quantised. Raises as `load_params` does."""
    return FORMATS[source.kind].stored_dtype(source.path)


def load_tokenizer(source: Source) -> Any:
    """A transformers tokenizer: the folder's own, or one built from a GGUF file's metadata.

    Nothing that a checkpoint brings is run.
    Raises: FileNotFoundError for a folder without tokenizer files; UnsupportedError for a kind of GGUF tokenizer
      that is not supported, or one that wants its own code to be run; UserError naming the file or folder where its
      tokenizer is damaged.
    """
    if source.kind == "gguf":
        with told(source.path):
            return build_tokenizer(gguf.read_header(source.path).meta)
    if (source.path / orbax.FINGERPRINT).is_file():
        raise FileNotFoundError(f"{source.name} is a draft, which uses its target's tokenizer: it has none of its own")
    if not has_tokenizer(source):
        raise FileNotFoundError(f"{source.path} holds no tokenizer: tokenizer.json or tokenizer_config.json is needed")
    with told(source.path):
        try:
            return transformers().AutoTokenizer.from_pretrained(source.path, trust_remote_code=False)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise UnsupportedError(
                f"the tokenizer of {source.name} ({source.path}) is code of its own, which jaxspec does not run: name "
                "another checkpoint of this model, one with a tokenizer.json, as the model or with tokenizer="
            ) from None


def has_tokenizer(source: Source) -> bool:
    """Whether the source brings one of its own."""
    known = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return source.kind == "gguf" or any((source.path / name).is_file() for name in known)


def fingerprint(tokenizer: Any) -> str:
    """A digest of what each id means."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def load_fingerprint(source: Source) -> str | None:
    """That of the tokenizer which a draft was trained for; None where the source has a tokenizer of its own."""
    path = source.path / orbax.FINGERPRINT
    if not path.is_file():
        return None
    with told(path):
        digest = path.read_text(encoding="utf-8").strip()
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise UserError(f"{short(digest)} is no SHA-256 digest of a tokenizer")
    return digest


def load_generation_config(source: Source) -> dict[str, Any]:
    """What a Hugging Face folder's generation_config.json holds; {} where there is none."""
    path = source.path / GENERATION_CONFIG
    return read_json(path) if source.kind == "hf" and path.is_file() else {}


def load_stop_ids(source: Source, tokenizer: Any = None) -> tuple[int, ...]:
    """The token ids that end a generation: the generation config's (else the configuration's; a GGUF file's eos and eot
    ids), then the tokenizer's EOS. Without repetitions. tokenizer: loaded from the source where not given.

    Raises: UserError naming the file for what is no id of 31 bits.
    """
    tokenizer = load_tokenizer(source) if tokenizer is None else tokenizer
    ids, raw = load_config(source).eos_ids, load_generation_config(source)
    with told(source.path / GENERATION_CONFIG):
        ids = token_ids(raw.get("eos_token_id"), "eos_token_id") or ids
    with told(source.path):
        return tuple(dict.fromkeys([*ids, *token_ids(tokenizer.eos_token_id, "the tokenizer's eos_token_id")]))
