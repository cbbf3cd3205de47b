"""Hugging Face folders: config.json and safetensors, in one file or in shards with an index."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints.assemble import Index, assemble
from checkpoints.library import transformers
from checkpoints.names import hf
from checkpoints.reading import read_json, told
from jaxspec.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.limits import short
from jaxspec.models.parameters import Parameter

INTEGERS = ("I64", "I32", "BOOL")
INDEX = "model.safetensors.index.json"
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def load_config(folder: Path) -> ModelConfig:
    """ModelConfig of a folder.

    Raises: FileNotFoundError without a config.json; UnsupportedError and UserError as ModelConfig.from_hf does.
    """
    with told(folder / "config.json"):
        return parse(read_json(folder / "config.json"))


def parse(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config.json. Raises as ModelConfig.from_hf does."""
    # Before transformers, which answers unknown kinds with a paragraph, and makes 10**9 labels where that is asked.
    known = ModelConfig.check_supported(raw)
    # AutoConfig fills the defaults that a family's config.json leaves out, and spells old options the new way.
    kind, reads_as = raw["model_type"], {family.model_type: family.reads_as for family in FAMILIES.values()}
    filled = transformers().AutoConfig.for_model(**known | {"model_type": reads_as.get(kind) or kind}).to_dict()
    return ModelConfig.from_hf(filled | {"model_type": kind})


def load_params(
    folder: Path, config: ModelConfig, abstract: Mapping[str, Parameter], *, progress: bool = True
) -> dict[str, jax.Array]:
    """Parameters with the shapes, dtypes and shardings of `abstract`; each device reads only its part.

    Raises: UserError for a missing, extra, misshapen or truncated tensor file; FileNotFoundError for a missing shard.
    """

    def edit(parameter: Parameter, part: str, x: np.ndarray) -> np.ndarray:
        # 1 + w is taken in float32: bfloat16 has too few bits near 1 for Gemma's small w.
        return x.astype(np.float32) + 1 if config.norm_plus_one and parameter.kind == "norm" else x

    shards, table = Shards(folder), hf(config.family)
    table = dataclasses.replace(table, ignored=table.ignored + heads_within(config, shards.shapes()))
    return assemble(config, abstract, table, shards, edit=edit, progress=progress)


def heads_within(config: ModelConfig, tensors: Iterable[str]) -> tuple[str, ...]:
    """Patterns of the tensors of drafting heads that stand in the model's own checkpoint: they are read by name."""
    after = f"model.layers.{config.num_layers}."  # where DeepSeek's kind puts its head
    heads = ("model.mtp_layers.*", "mtp.*", "medusa_head.*")
    return (*heads, after + "*") if after + "eh_proj.weight" in tensors else heads


def stored_dtype(folder: Path) -> str:
    """The dtype most of the weights are stored in: that of the largest tensor."""
    shards = Shards(folder)
    sizes = shards.shapes()
    largest = max(sizes, key=lambda name: math.prod(sizes[name]), default=None)
    if largest is None:
        raise UserError(f"{folder} holds no tensor: fetch it again")
    return FLOATS[shards.dtype(largest)]


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those that its index names, else the single one, else all.

    Raises: FileNotFoundError naming the missing shard, or the folder that holds none; UserError for an index that
    names none, or one outside the folder.
    """
    if (folder / INDEX).is_file():
        found = read_json(folder / INDEX).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise UserError(f"{folder / INDEX} has no weight_map (an object: tensor -> shard): fetch it again")
        # The name, not where it leads: the hub's cache links a snapshot's files to others outside its folder.
        for name in found.values():
            if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
                raise UserError(
                    f"{folder / INDEX} names {short(name)} as a shard: it must be a .safetensors file in the same "
                    "folder, named without a path; fetch it again"
                )
        names = sorted(set(found.values()))
        for name in names:
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder / name} is missing: {INDEX} names it as a shard")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no .safetensors file: only that format is read from folders")
    return files


class Shards:
    """The tensors of all shards under one roof. Files are mapped, not loaded."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._home: dict[str, Any] = {}  # tensor name -> open file
        for path in files_of(folder):
            with told(path):
                try:
                    file = safe_open(path, framework="np")
                except SafetensorError as error:
                    raise UserError(f"{path} is truncated or damaged ({error}): fetch it again") from None
                self._home |= dict.fromkeys(file.keys(), file)
        self._shapes = {name: tuple(self.slice(name).get_shape()) for name in self._home}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def slice(self, name: str) -> Any:
        return self._home[name].get_slice(name)

    def dtype(self, name: str) -> str:
        """A key of FLOATS. Raises: UnsupportedError where it is stored as something else."""
        if (found := self.slice(name).get_dtype()) not in FLOATS:
            raise UnsupportedError(f"{self.where}: tensor {name} is stored as {found}: {', '.join(FLOATS)} are read")
        return found

    def read(self, name: str, index: Index) -> np.ndarray:
        if self.slice(name).get_dtype() not in INTEGERS:
            self.dtype(name)
        with told(self.where):
            return self.slice(name)[index]
