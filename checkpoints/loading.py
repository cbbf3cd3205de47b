"""Whatever the format: configuration, weights and tokenizer of a Source."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from checkpoints import gguf, orbax, safetensors
from checkpoints.gguf_tokenizer import build_tokenizer
from checkpoints.library import transformers
from checkpoints.reading import read_config, read_json, there, told, without_nulls
from checkpoints.sources import TOKENIZER_FILES, Source
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.limits import short
from jaxspec.models.parameters import Parameter

FORMATS: Mapping[str, ModuleType] = {"hf": safetensors, "gguf": gguf, "orbax": orbax}
GENERATION_CONFIG = "generation_config.json"
TEMPLATES = "additional_chat_templates/*"
# In a tokenizer's configuration null is a value: no such token, where absence is the default of the tokenizer's class.
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


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
    if there(source.path / orbax.FINGERPRINT):
        raise FileNotFoundError(f"{source.name} is a draft, which uses its target's tokenizer: it has none of its own")
    if not has_tokenizer(source):
        raise FileNotFoundError(f"{source.path} holds no tokenizer: tokenizer.json or tokenizer_config.json is needed")
    for file in (file for pattern in (*TOKENIZER_FILES, TEMPLATES) for file in source.path.glob(pattern)):
        there(file)  # transformers opens some of them
    with told(source.path):
        try:
            return of_folder(source.path)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise UnsupportedError(
                f"the tokenizer of {source.name} ({source.path}) is code of its own, which jaxspec does not run: name "
                "another checkpoint of this model, one with a tokenizer.json, as the model or with tokenizer="
            ) from None


def of_folder(folder: Path) -> Any:
    """Read the tokenizer of a folder; without the keys that are null, where transformers refuses some of them."""
    read = lambda folder: transformers().AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    try:
        return read(folder)
    except Exception:
        with linked_without_nulls(folder) as other:
            if other is None:
                raise
            tokenizer = read(other)
    tokenizer.name_or_path = str(folder)
    return tokenizer


@contextlib.contextmanager
def linked_without_nulls(folder: Path) -> Iterator[Path | None]:
    """Make a folder of links to the files of this one. Configurations with keys that are null are written there without
    these; None where there are no such."""
    rewritten: dict[str, Any] = {}
    for name, kept in (("config.json", ()), ("tokenizer_config.json", SPECIAL_TOKENS)):
        if there(folder / name):
            raw = read_json(folder / name)
            if (said := without_nulls(raw, kept)) != raw:
                rewritten[name] = said
    if not rewritten:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="jaxspec-") as links:
        for path in folder.iterdir():
            if path.name not in rewritten:
                (Path(links) / path.name).symlink_to(path.resolve())
        for name, said in rewritten.items():
            (Path(links) / name).write_text(json.dumps(said), encoding="utf-8")
        yield Path(links)


def has_tokenizer(source: Source) -> bool:
    """Whether the source brings one of its own."""
    known = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return source.kind == "gguf" or any(there(source.path / name) for name in known)


def fingerprint(tokenizer: Any) -> str:
    """A digest of what each id means."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def load_fingerprint(source: Source) -> str | None:
    """That of the tokenizer which a draft was trained for; None where the source has a tokenizer of its own."""
    path = source.path / orbax.FINGERPRINT
    if not there(path):
        return None
    with told(path):
        digest = path.read_text(encoding="utf-8").strip()
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise UserError(f"{short(digest)} is no SHA-256 digest of a tokenizer")
    return digest


def load_generation_config(source: Source) -> dict[str, Any]:
    """What a Hugging Face folder's generation_config.json holds; {} where there is none."""
    path = source.path / GENERATION_CONFIG
    return read_config(path) if source.kind == "hf" and there(path) else {}
