"""Hugging Face folders: config.json and safetensors, in one file or in shards with an index; else torch's files."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints import hf_config
from checkpoints.assemble import assemble
from checkpoints.eight_bits import SCALE, widened
from checkpoints.library import transformers
from checkpoints.names import hf
from checkpoints.reading import read_config, read_json, there, told
from checkpoints.tensor_file import Index
from checkpoints.torch_files import TorchFile
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.limits import short
from jaxspec.models.parameters import Parameter

SIZES = ("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
INTEGERS = ("I64", "I32", "BOOL")
INDEX = "model.safetensors.index.json"
# Where a folder's tensors may be, the preferred first: in one file, which transformers takes whatever an index beside
# it says, in the shards of an index, in files like these.
LAYOUTS = (
    ("model.safetensors", INDEX, "*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "medusa_lm_head.pt"),
)
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def load_config(folder: Path) -> ModelConfig:
    """ModelConfig of a folder.

    Raises: FileNotFoundError without a config.json; UnsupportedError and UserError as `hf_config.model_config` does.
    """
    with told(folder / "config.json"):
        return parse(read_config(folder / "config.json"))


def parse(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config.json. Raises as `hf_config.model_config` does; UserError for one that lacks a size."""
    # Before transformers, which answers unknown kinds with a paragraph, and makes 10**9 labels where that is asked.
    known = hf_config.check_supported(raw)
    for key in SIZES:  # not taken from transformers, where they are those of another model
        if key not in known:
            raise UserError(f"{key} is missing")
    # AutoConfig fills the defaults that a family's config.json leaves out, and spells old options the new way. Ids it
    # does not know: those are what the file says, or none.
    kind, reads_as = raw["model_type"], {family.model_type: family.reads_as for family in FAMILIES.values()}
    filled = transformers().AutoConfig.for_model(**known | {"model_type": reads_as.get(kind) or kind}).to_dict()
    ids = {key: known.get(key) for key in ("bos_token_id", "eos_token_id")}
    return hf_config.model_config(filled | ids | {"model_type": kind})


def parse_layers(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse the config.json of a Llama that leaves nothing out. Transformers, which takes seconds to import, is asked
    only where it is needed: it knows how all have spelled what becomes of rope. Raises as `parse` does."""
    return parse(raw) if raw.keys() & {"rope_scaling", "rope_parameters"} else hf_config.model_config(raw)


def load_params(
    folder: Path, config: ModelConfig, abstract: Mapping[str, Parameter], *, progress: bool = True
) -> dict[str, jax.Array]:
    """Parameters with the shapes, dtypes and shardings of `abstract`; each device reads only its part.

    Raises: UserError for a missing, extra, misshapen or truncated tensor file; FileNotFoundError for a missing shard.
    """

    shards, table = Shards(folder), hf(config.family)
    heads = table.sources("head").values() if config.tied else ()  # some files repeat the embedding table as a head
    repeats = dict.fromkeys(heads, table.sources("embed")[""])
    table = dataclasses.replace(table, ignored=heads_within(shards.shapes()), repeats=repeats)
    return assemble(config, abstract, table, shards, edit=edit(config.norm_plus_one), progress=progress)


def edit(norm_plus_one: bool) -> Callable[[Parameter, str, np.ndarray], np.ndarray]:
    """What undoes what a file did to the numbers of its norms; norm_plus_one: it holds what is added to 1."""
    # In float32: bfloat16 has too few bits near 1 for Gemma's small w.
    return lambda parameter, part, x: x.astype(np.float32) + 1 if norm_plus_one and parameter.kind == "norm" else x


def heads_within(tensors: Iterable[str]) -> tuple[str, ...]:
    """Patterns of the tensors of drafting heads that stand in the model's own checkpoint: they are read by name."""
    last = ".eh_proj.weight"  # DeepSeek's kind counts its heads on after the model's layers
    after = [name.removesuffix(last) for name in tensors if re.fullmatch(rf"model\.layers\.\d+{re.escape(last)}", name)]
    return ("model.mtp_layers.*", "mtp.*", "medusa_head.*", *(f"{layer}.*" for layer in after))


def stored_dtype(folder: Path) -> str:
    """The dtype most of the weights are stored in: that of the largest tensor."""
    shards = Shards(folder)
    sizes = shards.shapes()
    largest = max(sizes, key=lambda name: math.prod(sizes[name]), default=None)
    if largest is None:
        raise UserError(f"{folder} holds no tensor: fetch it again")
    return FLOATS[shards.dtype(largest)]


def files_of(folder: Path) -> list[Path]:
    """The files of a folder's tensors: the single one, else those that its index names, else all.

    Raises: FileNotFoundError naming the missing shard, or the folder that holds none; UserError for an index that
    names none, or one outside the folder.
    """
    for single, index, others in LAYOUTS:
        if there(folder / single):
            return [folder / single]
        if there(folder / index):
            return shards_of(folder / index, Path(single).suffix)
        if files := sorted(file for file in folder.glob(others) if there(file)):
            return files
    one = ", ".join(single for single, *_ in LAYOUTS)
    raise FileNotFoundError(f"{folder} holds no .safetensors file, nor one of torch's: {one} or shards are looked for")


def shards_of(index: Path, suffix: str) -> list[Path]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise UserError(f"{index} has no weight_map (an object: tensor -> shard): fetch it again")
    # The name, not where it leads: the hub's cache links a snapshot's files to others outside its folder.
    for name in found.values():
        if not isinstance(name, str) or not re.fullmatch(rf"[^/\\\0]+\{suffix}", name):
            raise UserError(
                f"{index} names {short(name)} as a shard: it must be a {suffix} file in the same folder, named without "
                "a path; fetch it again"
            )
    files = [index.parent / name for name in sorted(set(found.values()))]
    for path in files:
        if not there(path):
            raise FileNotFoundError(f"{path} is missing: {index.name} names it as a shard")
    return files


def opened(path: Path) -> Any:
    """The file, mapped: names, shapes, slices."""
    if path.suffix != ".safetensors":
        return TorchFile(path)
    with told(path):
        try:
            return safe_open(path, framework="np")
        except SafetensorError as error:
            raise UserError(f"{path} is truncated or damaged ({error}): fetch it again") from None


class Shards:
    """The tensors of all shards under one roof. Files are mapped, not loaded."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._home: dict[str, Any] = {}  # tensor name -> open file
        for path in files_of(folder):
            file = opened(path)
            self._home |= dict.fromkeys(file.keys(), file)
        every = {name: tuple(self.slice(name).get_shape()) for name in self._home}
        narrow = {name for name in every if name + SCALE in every and self.slice(name).get_dtype() == "I8"}
        self._groups = {name: self.group(every[name], every[name + SCALE], name) for name in narrow}
        scales = {name + SCALE for name in narrow}
        self._shapes = {name: shape for name, shape in every.items() if name not in scales}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def slice(self, name: str) -> Any:
        return self._home[name].get_slice(name)

    def group(self, shape: tuple[int, ...], scales: tuple[int, ...], name: str) -> int:
        """How many integers of 8 bits a scale counts for."""
        if not shape or not scales or shape[:-1] != scales[:-1] or not scales[-1] or shape[-1] % scales[-1]:
            raise UserError(f"{self.where}: tensor {name} has shape {shape}, its scales {scales}: fetch it again")
        return shape[-1] // scales[-1]

    def dtype(self, name: str) -> str:
        """A key of FLOATS; of integers with scales, that of these. Raises: UnsupportedError where it is stored as
        something else."""
        if (found := self.slice(name + SCALE if name in self._groups else name).get_dtype()) not in FLOATS:
            raise UnsupportedError(f"{self.where}: tensor {name} is stored as {found}: {', '.join(FLOATS)} are read")
        return found

    def read(self, name: str, index: Index) -> np.ndarray:
        if self.slice(name).get_dtype() not in INTEGERS:
            self.dtype(name)
        with told(self.where):
            x = self.slice(name)[index]
            if (size := self._groups.get(name)) is None:
                return x
            first, last, _ = index[-1].indices(self._shapes[name][-1])
            scale = self.slice(name + SCALE)[(*index[:-1], slice(first // size, -(-last // size)))]
            return widened(x, np.repeat(scale, size, axis=-1)[..., first % size :][..., : last - first])
