"""Loading of configuration, weights and tokenizer from a checkpoint (`Source`) of any format."""

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

from checkpoints import gguf, orbax, safetensors
from checkpoints.assemble import Keep, unchanged
from checkpoints.gguf_tokenizer import build_tokenizer
from checkpoints.library import transformers
from checkpoints.published import Published
from checkpoints.reading import is_regular_file, naming_file, read_config, read_json, without_nulls
from checkpoints.sources import TOKENIZER_FILES, Source
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.limits import short
from jaxspec.models.parameters import Parameter
from jaxspec.options.quantization import Quantization

FORMATS: Mapping[str, ModuleType] = {"hf": safetensors, "gguf": gguf, "orbax": orbax}
GENERATION_CONFIG = "generation_config.json"
TEMPLATES = "additional_chat_templates/*"
# Keys of tokenizer_config.json where null means that the tokenizer has no such token. A missing key means the default
# of the tokenizer's class.
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def load_config(source: Source) -> ModelConfig:
    """Return the configuration of a checkpoint's model.

    Raises: UnsupportedError for an unsupported architecture; FileNotFoundError or UserError, naming the file, where
      a file is missing, truncated or damaged.
    """
    result: ModelConfig = FORMATS[source.kind].load_config(source.path)
    return result


def load_params(
    source: Source,
    config: ModelConfig,
    abstract: Mapping[str, Parameter],
    *,
    keep: Keep = unchanged,
    progress: bool = True,
    blocks: bool = False,
) -> dict[str, Any]:
    """Load a model's parameters and place them on their devices. Each device's slices are read separately.

    Args:
      source: the file or folder that holds the model.
      config: configuration of the model, as `load_config` returns it.
      abstract: the parameters by name, with dtype and sharding, from `jaxspec.models.decoder.abstract_params`.
      keep: function keep(name, declaration, values) whose result replaces a parameter's values in the returned dict. It
        is called as soon as a parameter is loaded, so a `keep` that quantises limits the memory needed. Parameters that
        the checkpoint holds in 8 or 4 bits are passed as `Scaled` or `Grouped` weights.
      progress: whether to show progress on standard error if loading takes long.
      blocks: whether matrices of a GGUF file stay in their blocks (`checkpoints.gguf_blocks`).

    Raises: UserError naming the tensor that is missing, extra or of a wrong shape, or the file that is truncated;
      FileNotFoundError naming a missing shard; UnsupportedError for a dtype or quantisation that is not read.
    """
    result: dict[str, Any] = FORMATS[source.kind].load_params(
        source.path, config, abstract, keep=keep, progress=progress, **of_blocks(blocks)
    )
    return result


def stored_quantization(source: Source) -> Published | None:
    """Return the 8-bit forms in which a checkpoint holds its weights, None for other forms.

    Raises: UnsupportedError for a quantised checkpoint that is not read.
    """
    result: Published | None = FORMATS[source.kind].stored_quantization(source.path)
    return result


def of_blocks(blocks: bool) -> dict[str, bool]:
    """Return the keyword argument `blocks`, which only the functions for GGUF files have."""
    return {"blocks": True} if blocks else {}


def stored_forms(
    source: Source, config: ModelConfig, known: Mapping[str, Parameter], *, blocks: bool = False
) -> dict[str, Quantization]:
    """Return the form of each parameter that is quantised in the checkpoint and stays so in memory.

    The dict is empty for a checkpoint without such parameters. For a Hugging Face folder config.json alone decides, so
    that no weights are needed.

    known: declarations of the parameters, by name.
    blocks: as in `load_params`.
    Raises: UnsupportedError for a quantised checkpoint that is not read; UserError for blocks that do not divide.
    """
    stored_forms = FORMATS[source.kind].stored_forms
    result: dict[str, Quantization] = stored_forms(source.path, config, known, **of_blocks(blocks))
    return result


def stored_dtype(source: Source) -> str:
    """Return the float dtype of the largest tensor, in which most weights are stored.

    Tensors that stay in 8 bits do not count. The result is "bfloat16" for other quantised weights.

    Raises as `load_params` does.
    """
    result: str = FORMATS[source.kind].stored_dtype(source.path)
    return result


def load_tokenizer(source: Source) -> Any:
    """Return the tokenizer of a checkpoint as a transformers tokenizer.

    The tokenizer of a folder is loaded; for a GGUF file one is built from the file's metadata. No code from the
    checkpoint is run.
    Raises: FileNotFoundError for a folder without tokenizer files; UnsupportedError for a kind of GGUF tokenizer
      that is not supported, or a tokenizer that is custom code; UserError, naming the file or folder, where its
      tokenizer is damaged.
    """
    if source.kind == "gguf":
        with naming_file(source.path):
            return build_tokenizer(gguf.read_header(source.path).meta)
    if is_regular_file(source.path / orbax.FINGERPRINT):
        raise FileNotFoundError(f"{source.name} is a draft, which uses its target's tokenizer: it has none of its own")
    if not has_tokenizer(source):
        raise FileNotFoundError(f"{source.path} holds no tokenizer: tokenizer.json or tokenizer_config.json is needed")
    for pattern in (*TOKENIZER_FILES, TEMPLATES):
        for file in source.path.glob(pattern):
            is_regular_file(file)  # raises for a fifo or device, which transformers might open
    with naming_file(source.path):
        try:
            return of_folder(source.path)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise UnsupportedError(
                f"the tokenizer of {source.name} ({source.path}) is custom code, which jaxspec does not run: name "
                "another checkpoint of this model, one with a tokenizer.json, as the model or with tokenizer="
            ) from None


def of_folder(folder: Path) -> Any:
    """Read the tokenizer of a folder.

    If transformers fails, try again with copies of the configuration files that have no null entries.
    """

    def read(folder: Path) -> Any:
        return transformers().AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

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
    """Yield a temporary copy of a folder in which config.json and tokenizer_config.json have no null entries.

    Null entries for SPECIAL_TOKENS in tokenizer_config.json stay. The other files of the copy are links. Yield None if
    there are no null entries to remove.
    """
    rewritten: dict[str, Any] = {}
    for name, kept in (("config.json", ()), ("tokenizer_config.json", SPECIAL_TOKENS)):
        if is_regular_file(folder / name):
            raw = read_json(folder / name)
            cleaned = without_nulls(raw, kept)
            if cleaned != raw:
                rewritten[name] = cleaned
    if not rewritten:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="jaxspec-") as links:
        for path in folder.iterdir():
            if path.name not in rewritten:
                (Path(links) / path.name).symlink_to(path.resolve())
        for name, cleaned in rewritten.items():
            (Path(links) / name).write_text(json.dumps(cleaned), encoding="utf-8")
        yield Path(links)


def has_tokenizer(source: Source) -> bool:
    """Return whether the checkpoint contains a tokenizer. A draft's folder may lack one."""
    known = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return source.kind == "gguf" or any(is_regular_file(source.path / name) for name in known)


def fingerprint(tokenizer: Any) -> str:
    """Return a SHA-256 digest of the tokenizer's vocabulary: its tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def load_fingerprint(source: Source) -> str | None:
    """Return the fingerprint (SHA-256 digest) of the tokenizer that a draft was trained for.

    The result is None if the checkpoint has no file tokenizer.sha256.
    Raises: UserError, naming the file, where it holds no SHA-256 digest.
    """
    path = source.path / orbax.FINGERPRINT
    if not is_regular_file(path):
        return None
    with naming_file(path):
        digest = path.read_text(encoding="utf-8").strip()
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise UserError(f"{short(digest)} is not the SHA-256 digest of a tokenizer")
    return digest


def load_generation_config(source: Source) -> dict[str, Any]:
    """Return the content of generation_config.json in a Hugging Face folder; {} for no such file or another format."""
    path = source.path / GENERATION_CONFIG
    return read_config(path) if source.kind == "hf" and is_regular_file(path) else {}
