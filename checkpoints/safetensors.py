"""Hugging Face folders: config.json, and weights in safetensors files or, without these, in torch's files."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints import hf_config
from checkpoints.assemble import Keep, assemble, unchanged
from checkpoints.eight_bits import SCALE, dequantised
from checkpoints.library import transformers
from checkpoints.names import hf
from checkpoints.reading import is_regular_file, naming_file, read_config, read_json
from checkpoints.tensor_file import Index
from checkpoints.torch_files import TorchFile
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.limits import short
from jaxspec.models.parameters import Parameter

# Keys that a config.json must have before transformers fills in defaults.
SIZES = ("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
# Integer and bool dtypes of tensors that are read, in the notation of safetensors.
INTEGERS = ("I64", "I32", "BOOL")
INDEX = "model.safetensors.index.json"
# For safetensors and for torch: where a folder's tensors may be. This is a single file, the shards that an index names,
# or all files of a pattern. The first that exists is used. Transformers, too, prefers the single file over an index.
LAYOUTS = (
    ("model.safetensors", INDEX, "*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "medusa_lm_head.pt"),
)
# Dtypes of floating-point tensors: numpy's name for each, by the notation of safetensors.
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def load_config(folder: Path) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face folder.

    Raises: FileNotFoundError where there is no config.json; UnsupportedError and UserError as `hf_config.model_config`
      does.
    """
    with naming_file(folder / "config.json"):
        return parse(read_config(folder / "config.json"))


def parse(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig that the content of a config.json describes.

    Raises as `hf_config.model_config` does; UserError where a key of SIZES is missing.
    """
    # The content is checked before transformers reads it: transformers' errors are paragraphs, and transformers would
    # create a billion labels if the content asked for that.
    known = hf_config.check_supported(raw)
    for key in SIZES:  # transformers' defaults for missing sizes would be those of another model
        if key not in known:
            raise UserError(f"{key} is missing")
    # AutoConfig fills in the defaults that a family's config.json leaves out, and renames old options.
    kind = raw["model_type"]
    reads_as = {family.model_type: family.reads_as for family in FAMILIES.values()}
    filled = transformers().AutoConfig.for_model(**known | {"model_type": reads_as.get(kind) or kind}).to_dict()
    ids = {key: known.get(key) for key in ("bos_token_id", "eos_token_id")}  # ids without transformers' defaults
    return hf_config.model_config(filled | ids | {"model_type": kind})


def parse_layers(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig that the content of a Llama's config.json describes. Raises as `parse` does.

    The content must have all keys of `hf_config.NEEDED`. Transformers, which takes seconds to import, is used only if
    there is a key rope_scaling or rope_parameters, because transformers knows all spellings of the options there.
    """
    if raw.keys() & {"rope_scaling", "rope_parameters"}:
        return parse(raw)
    return hf_config.model_config(raw)


def load_params(
    folder: Path,
    config: ModelConfig,
    abstract: Mapping[str, Parameter],
    *,
    keep: Keep = unchanged,
    progress: bool = True,
) -> dict[str, Any]:
    """Load a Hugging Face folder's parameters with the shapes, dtypes and shardings of `abstract`.

    Each device's shard of a parameter is read separately.

    keep, progress: as in `checkpoints.load_params`.
    Raises: UserError for a missing, extra or misshapen tensor or a truncated file; FileNotFoundError for a missing
      shard of the checkpoint.
    """
    shards = Shards(folder)
    table = hf(config.family)
    # With tied embeddings, a tensor for the output head repeats the embedding table.
    heads = table.sources("head").values() if config.tied else ()
    repeats = dict.fromkeys(heads, table.sources("embed")[""])
    table = dataclasses.replace(table, ignored=heads_within(shards.shapes()), repeats=repeats)
    return assemble(config, abstract, table, shards, edit=edit(config.norm_plus_one), keep=keep, progress=progress)


def edit(norm_plus_one: bool) -> Callable[[Parameter, str, np.ndarray], np.ndarray]:
    """Return the function `edit` that `assemble` applies to each tensor of a Hugging Face folder.

    norm_plus_one: whether the file stores w for norms that multiply by 1 + w.
    """

    def add_one(parameter: Parameter, part: str, x: np.ndarray) -> np.ndarray:
        if norm_plus_one and parameter.kind == "norm":
            return x.astype(np.float32) + 1  # as float32: bfloat16 has too few bits near 1 for Gemma's small w
        return x

    return add_one


def heads_within(tensors: Iterable[str]) -> tuple[str, ...]:
    """Return shell patterns of the tensors of drafting heads in a model's own checkpoint, which the model ignores.

    tensors: names of the checkpoint's tensors.
    """
    last = ".eh_proj.weight"  # tensor of a head in DeepSeek's format, whose heads are numbered after the model's layers
    after = [name.removesuffix(last) for name in tensors if re.fullmatch(rf"model\.layers\.\d+{re.escape(last)}", name)]
    return ("model.mtp_layers.*", "mtp.*", "medusa_head.*", *(f"{layer}.*" for layer in after))


def stored_dtype(folder: Path) -> str:
    """Return the dtype of a Hugging Face folder's largest tensor, in which most weights are stored."""
    shards = Shards(folder)
    sizes = shards.shapes()
    largest = max(sizes, key=lambda name: math.prod(sizes[name]), default=None)
    if largest is None:
        raise UserError(f"{folder} holds no tensors: fetch it again")
    return FLOATS[shards.dtype(largest)]


def files_of(folder: Path) -> list[Path]:
    """Return the files that hold a folder's tensors: those of the first entry of LAYOUTS that exist.

    Raises: FileNotFoundError naming the missing shard, or the folder that holds no weights; UserError for an index
      that names no shard, or a shard outside the folder.
    """
    for single, index, others in LAYOUTS:
        if is_regular_file(folder / single):
            return [folder / single]
        if is_regular_file(folder / index):
            return shards_of(folder / index, Path(single).suffix)
        if files := sorted(file for file in folder.glob(others) if is_regular_file(file)):
            return files
    one = ", ".join(single for single, *_ in LAYOUTS)
    raise FileNotFoundError(f"{folder} holds no weights in safetensors or torch files: {one} or shards are needed")


def shards_of(index: Path, suffix: str) -> list[Path]:
    """Return the shard files that an index file names. suffix: suffix of a shard's name. Raises as `files_of` does."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise UserError(f"{index} has no weight_map (an object: tensor -> shard): fetch it again")
    # Only the shard's name is checked, not the file that it links to: in the hub's cache that is outside the folder.
    for name in found.values():
        if not isinstance(name, str) or not re.fullmatch(rf"[^/\\\0]+\{suffix}", name):
            raise UserError(
                f"{index} names {short(name)} as a shard: it must be a {suffix} file in the same folder, named without "
                "a path; fetch it again"
            )
    files = [index.parent / name for name in sorted(set(found.values()))]
    for path in files:
        if not is_regular_file(path):
            raise FileNotFoundError(f"{path} is missing: {index.name} names it as a shard")
    return files


def opened(path: Path) -> Any:
    """Open a safetensors or torch file.

    Raises: UserError where it is truncated or damaged; UnsupportedError as `torch_files.loader` does for a torch file.
    """
    if path.suffix != ".safetensors":
        return TorchFile(path)
    with naming_file(path):
        try:
            return safe_open(path, framework="np")
        except SafetensorError as error:
            raise UserError(f"{path} is truncated or damaged ({error}): fetch it again") from None


class Shards:
    """The tensors of all shard files of a folder.

    The files are mapped into memory, not loaded, except torch files in an older format (see `TorchFile`).
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._home: dict[str, Any] = {}  # the open file that holds each tensor, by the tensor's name
        for path in files_of(folder):
            file = opened(path)
            self._home |= dict.fromkeys(file.keys(), file)
        stored = {name: tuple(self.slice(name).get_shape()) for name in self._home}
        quantised = {name for name in stored if name + SCALE in stored and self.slice(name).get_dtype() == "I8"}
        self._groups = {name: self.group(stored[name], stored[name + SCALE], name) for name in quantised}
        scales = {name + SCALE for name in quantised}
        self._shapes = {name: shape for name, shape in stored.items() if name not in scales}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def slice(self, name: str) -> Any:
        """Return a tensor's slice object, which reads a slice of the tensor when it is indexed.

        The slice object is from the safetensors library, or a `torch_files.Slice`.
        """
        return self._home[name].get_slice(name)

    def group(self, shape: tuple[int, ...], scales: tuple[int, ...], name: str) -> int:
        """Return the number of 8-bit integers that share a scale in a quantised tensor.

        shape, scales: shapes of the tensor's integers and of its scales.
        Raises: UserError where these shapes do not fit each other.
        """
        if not shape or not scales or shape[:-1] != scales[:-1] or not scales[-1] or shape[-1] % scales[-1]:
            raise UserError(
                f"{self.where}: tensor {name} has shape {shape}, which its scales of shape {scales} do not divide: "
                "fetch it again"
            )
        return shape[-1] // scales[-1]

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype in the notation of safetensors. An 8-bit quantised tensor has its scales' dtype.

        Raises: UnsupportedError for a tensor whose dtype is not in FLOATS.
        """
        found = self.slice(name + SCALE if name in self._groups else name).get_dtype()
        if found not in FLOATS:
            raise UnsupportedError(
                f"{self.where}: tensor {name} is stored as {found}: {', '.join(FLOATS)} are supported"
            )
        result: str = found
        return result

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return the slice `index` of a tensor, dequantised if the tensor is quantised.

        Raises as `dtype` does, except for integers; UserError for a damaged file.
        """
        if self.slice(name).get_dtype() not in INTEGERS:
            self.dtype(name)
        with naming_file(self.where):
            x = self.slice(name)[index]
            size = self._groups.get(name)
            if size is None:
                result: np.ndarray = x
                return result
            first, last, _ = index[-1].indices(self._shapes[name][-1])
            scale = self.slice(name + SCALE)[(*index[:-1], slice(first // size, -(-last // size)))]
            return dequantised(x, np.repeat(scale, size, axis=-1)[..., first % size :][..., : last - first])
