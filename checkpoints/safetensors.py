"""Hugging Face folders: config.json, and weights in safetensors files or, without these, in torch's files."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints import eight_bit_tensors, four_bit_tensors, hf_config, published, published_forms
from checkpoints.assemble import Keep, assemble, unchanged
from checkpoints.edits import edit, rotary_order
from checkpoints.eight_bit_tensors import FLOATS, EightBits
from checkpoints.eight_bits import SCALE
from checkpoints.four_bit_tensors import FourBits
from checkpoints.library import transformers
from checkpoints.names import Table, hf_of
from checkpoints.published import Published
from checkpoints.reading import is_regular_file, naming_file, read_config, read_json
from checkpoints.tensor_file import Index, text_decoder_names
from checkpoints.torch_files import TorchFile
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.limits import short
from jaxspec.models.parameters import Parameter
from jaxspec.options.quantization import Quantization

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
    raw = hf_config.text_part(raw)
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
    undo = edit(config.norm_plus_one, rotary_order(config))
    return assemble(config, abstract, table_of(config, shards), shards, edit=undo, keep=keep, progress=progress)


def table_of(config: ModelConfig, shards: Shards) -> Table:
    """Return the table of a model's tensor names, which ignores drafting heads, and biases of zeros, that it lacks."""
    table = hf_of(config)
    # With tied embeddings, a tensor for the output head repeats the embedding table.
    heads = table.sources("head").values() if config.tied else ()
    repeats = dict.fromkeys(heads, table.sources("embed")[""])
    ignored = (*table.ignored, *heads_within(shards.shapes()), *zero_biases(shards))
    return dataclasses.replace(table, ignored=ignored, repeats=repeats)


def heads_within(tensors: Iterable[str]) -> tuple[str, ...]:
    """Return shell patterns of the tensors of drafting heads in a model's own checkpoint, which the model ignores.

    tensors: names of the checkpoint's tensors.
    """
    last = ".eh_proj.weight"  # tensor of a head in DeepSeek's format, whose heads are numbered after the model's layers
    after = [name.removesuffix(last) for name in tensors if re.fullmatch(rf"model\.layers\.\d+{re.escape(last)}", name)]
    return ("model.mtp_layers.*", "mtp.*", "medusa_head.*", *(f"{layer}.*" for layer in after))


def zero_biases(shards: Shards) -> list[str]:
    """Return the names of biases of zeros beside matrices in 4 bits, which AutoGPTQ wrote for models without biases."""
    shapes = shards.shapes()
    names = [name.removesuffix("weight") + "bias" for name in shapes if shards.grouped(name)]
    return [name for name in names if name in shapes and not shards.read(name, (slice(None),)).any()]


def stored_dtype(folder: Path) -> str:
    """Return the dtype of a Hugging Face folder's largest tensor that is not quantised, "bfloat16" if all are."""
    shards = Shards(folder)
    sizes = shards.shapes()
    if not sizes:
        raise UserError(f"{folder} holds no tensors: fetch it again")
    floats = [name for name in sizes if not shards.eight_bits(name) and not shards.grouped(name)]
    largest = max(floats, key=lambda name: math.prod(sizes[name]), default=None)
    return "bfloat16" if largest is None else FLOATS[shards.dtype(largest)]


def stored_quantization(folder: Path) -> Published | None:
    """Return the 8-bit forms that a folder's config.json names, as `checkpoints.stored_quantization` does."""
    return published.of_folder(folder)


def stored_forms(folder: Path, config: ModelConfig, known: Mapping[str, Parameter]) -> dict[str, Quantization]:
    """Return the form in memory of each parameter that stays in 8 bits, as `checkpoints.stored_forms` does."""
    return published_forms.forms(published.of_folder(folder), hf_of(config), known)


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

    published: the 8-bit forms that the folder's config.json names, None if it names none.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.published = published.of_folder(folder)
        self._home: dict[str, Any] = {}  # the open file that holds each tensor, by the tensor's name
        self._float8: dict[str, Any] = {}  # slice objects of the tensors in float8_e4m3fn
        for path in files_of(folder):
            file = opened(path)
            self._home |= dict.fromkeys(file.keys(), file)
            if path.suffix == ".safetensors":
                self._float8 |= eight_bit_tensors.float8_slices(path)
        self._names = text_decoder_names(self._home)  # the name in its file of each tensor
        stored = {name: tuple(self.slice(name).get_shape()) for name in self._names}
        self._quantised = dict(self.quantised(stored))
        hidden = {part for name in self._quantised for part in eight_bit_tensors.beside(name)}
        hidden |= {part for name, x in self._quantised.items() if isinstance(x, FourBits) for part in x.names}
        if self.published:
            hidden |= {name for name in stored if name.endswith(eight_bit_tensors.SKIPPED)}
        shapes = {name: found.shape for name, found in self._quantised.items()}
        self._shapes = {name: shape for name, shape in stored.items() if name not in hidden} | shapes

    def quantised(self, stored: Mapping[str, tuple[int, ...]]) -> Iterable[tuple[str, EightBits | FourBits]]:
        """Yield the name of each quantised tensor, and how it is stored. stored: shapes of all tensors.

        Raises as `eight_bit_tensors.find`, `four_bit_tensors.find` and `group` do.
        """
        if self.published:
            found = dict(four_bit_tensors.find(self.where, stored, self.published, self.slice))
            yield from found.items()
            taken = {part for tensor in found.values() for part in tensor.names}
            others = {name: shape for name, shape in stored.items() if name not in taken}
            yield from eight_bit_tensors.find(self.where, others, self.published, self.slice)
            return
        for name, shape in stored.items():
            if name + SCALE in stored and self.kind(name) == "I8":
                size = self.group(shape, stored[name + SCALE], name)
                form = Quantization("int8", size, 1)
                dtype = self.kind(name + SCALE)
                yield name, EightBits(self.where, self.slice, shape, form, name, name + SCALE, dtype, stays=False)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def slice(self, name: str) -> Any:
        """Return a tensor's slice object, which reads a slice of the tensor when it is indexed.

        The slice object is from the safetensors library, a `torch_files.Slice`, or an `eight_bit_tensors.Float8Slice`.
        """
        own = self._names[name]
        return self._float8.get(own) or self._home[own].get_slice(own)

    def kind(self, name: str) -> str:
        """Return the dtype in which a tensor is stored, in the notation of safetensors."""
        result: str = self.slice(name).get_dtype()
        return result

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
        """Return the dtype, in the notation of safetensors, in which `read` returns a tensor of floating point.

        Raises: UnsupportedError for a tensor whose dtype is not in FLOATS.
        """
        quantised = self._quantised.get(name)
        found = quantised.dtype if quantised else self.kind(name)
        if found not in FLOATS:
            raise UnsupportedError(
                f"{self.where}: tensor {name} is stored as {found}: {', '.join(FLOATS)} are supported"
            )
        return found

    def eight_bits(self, name: str) -> EightBits | None:
        """Return a tensor that stays in 8 bits in memory, None for any other tensor."""
        found = self._quantised.get(name)
        return found if isinstance(found, EightBits) and found.stays else None

    def grouped(self, name: str) -> FourBits | None:
        """Return a tensor that stays in 4 bits in memory, None for any other tensor."""
        found = self._quantised.get(name)
        return found if isinstance(found, FourBits) else None

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return the slice `index` of a tensor, dequantised if the tensor is quantised.

        Raises as `dtype` does, except for integers; UserError for a damaged file, or as `EightBits.scales` does.
        """
        if name in self._quantised:
            return self._quantised[name].read(index)
        if self.kind(name) not in INTEGERS:
            self.dtype(name)
        with naming_file(self.where):
            result: np.ndarray = self.slice(name)[index]
            return result
