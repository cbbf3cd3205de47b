"""Folders of drafting heads: a config.json and tensors, whose meaning depends on the head's method."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from checkpoints import eight_bits
from checkpoints.assemble import assemble, copying, place, stored_shape
from checkpoints.copies import same
from checkpoints.hf_config import ACTIVATIONS
from checkpoints.names import Table, hf
from checkpoints.orbax import FINGERPRINT, appearing
from checkpoints.reading import is_regular_file, read_config
from checkpoints.safetensors import FLOATS, Shards, edit
from checkpoints.sources import TOKENIZER_FILES
from checkpoints.tensor_file import Index
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.families import FAMILIES, Place
from jaxspec.models.parameters import Parameter
from jaxspec.models.reading import Reading


def contents(folder: Path) -> tuple[dict[str, Any], Mapping[str, tuple[int, ...]]]:
    """Return the config.json of a folder, {} where there is none, and the shapes of its tensors by name.

    Raises as `checkpoints.safetensors` does.
    """
    path = folder / "config.json"
    config = read_config(path) if is_regular_file(path) else {}
    return config, Shards(folder).shapes()


def convert(folder: Path, dst: Path, dtype: str | None = None, weight_bits: int | None = None) -> None:
    """Write a copy of a head's folder with its tensors in safetensors.

    dtype, weight_bits: as in `write`.
    Raises as `checkpoints.safetensors` does.
    """
    shards = Shards(folder)
    write(dst, {name: whole(shards, name) for name in shards.shapes()}, folder, dtype, weight_bits=weight_bits)


def whole(shards: Shards, name: str) -> np.ndarray:
    """Return all of a tensor, as it is stored."""
    return shards.read(name, (slice(None),) * len(shards.shapes()[name]))


def write(
    dst: Path,
    tensors: Mapping[str, np.ndarray],
    folder: Path,
    dtype: str | None = None,
    config: Mapping[str, Any] | None = None,
    weight_bits: int | None = None,
) -> None:
    """Write a head's folder with these tensors, and with copies of the other files of `folder`.

    dtype: dtype that floats are converted to; None keeps theirs.
    config: content of config.json; None copies that of `folder`.
    weight_bits: 8 to store matrices in the form of `eight_bits`; None to store all tensors in their dtype.
    """
    if dtype is not None:
        floats = {name: x for name, x in tensors.items() if x.dtype.kind not in "iub"}
        tensors = {**tensors, **{name: x.astype(jnp.dtype(dtype)) for name, x in floats.items()}}
    if weight_bits is not None:
        tensors = eight_bits.split(tensors)
    beside = [
        path for pattern in (*TOKENIZER_FILES, FINGERPRINT) for path in folder.glob(pattern) if is_regular_file(path)
    ]
    with appearing(dst) as partial:
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, partial / "model.safetensors")
        for path in beside:
            if not path.name.endswith(".index.json"):  # the tensors are in one file now
                shutil.copyfile(path, partial / path.name)
        if config is not None:
            (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def table_of(reading: Reading) -> Table:
    """Return the table of a head's tensors. Copies of the target's tensors are ignored: they were compared before."""
    ignored = (*reading.ignored, *reading.copies, *reading.ones)
    return Table(dict(reading.names), ignored, repeats=reading.repeats, tied_by="tie_weights")


def load(
    folder: Path, reading: Reading, abstract: Mapping[str, Parameter], *, progress: bool = True
) -> dict[str, jax.Array]:
    """Load the parameters of a head. With a reduced vocabulary they include the id tables of both directions.

    reading: how the head's checkpoint is read.
    Raises as `checkpoints.load_params` does; UserError for tensors that contradict each other.
    """
    file = Shards(folder)
    stored = {name: p for name, p in abstract.items() if name != "t2d"}  # t2d is computed from d2t
    undo = edit(reading.norm_plus_one)
    params = assemble(reading.config, stored, table_of(reading), file, edit=undo, progress=progress)
    check_ones(reading, file)
    target_ids = np.arange(reading.config.vocab_size)  # the target's id for each of the head's own
    if "t2d" in abstract:
        target_ids = np.asarray(params["d2t"], np.int64)
        if not reading.absolute_ids:
            target_ids = target_ids + np.arange(len(target_ids))
        params |= id_tables(folder, target_ids, abstract)
    check_t2d(file, target_ids, reading.config.vocab_size)
    return params


def check_ones(reading: Reading, file: Shards) -> None:
    """Raise UnsupportedError for a norm that the head's architecture lacks, unless all its weights are 1."""
    for name in reading.ones:
        if name in file.shapes() and not (whole(file, name) == 1).all():
            method = draft_spec(reading.config).method
            raise UnsupportedError(
                f"{file.where}: tensor {name} is a norm that a head of method {method!r} lacks: take it out where it "
                "is not meant"
            )


def check_t2d(file: Shards, target_ids: np.ndarray, all_ids: int) -> None:
    """Raise UserError where a file's t2d marks other ids of the target than d2t names.

    target_ids: the target's ids that d2t names; all_ids: size of the target's vocabulary.
    """
    if "t2d" not in file.shapes():
        return
    found = whole(file, "t2d")
    wanted = np.isin(np.arange(all_ids), target_ids)
    if found.shape != wanted.shape or (found.astype(bool) != wanted).any():
        raise UserError(f"{file.where}: t2d does not name the ids that d2t does: fetch it again")


def differing_copies(
    folder: Path,
    copies: Mapping[str, Place],
    target: ModelConfig,
    known: Mapping[str, Parameter],
    target_parameter: Callable[[str], jax.Array],
) -> frozenset[str]:
    """Return the names of the tensors in a head's folder that differ from the target's parameters they copy.

    copies: for each tensor the target's parameter and the part of it; part "d2t" means only the ids that d2t names.
    known: the declarations of the target's parameters.
    target_parameter(name): the values of a parameter of the target.
    """
    file = Shards(folder)
    plus_one = FAMILIES[target.family].norm_plus_one
    found: set[str] = set()
    for where, names in by_parameter(copies):
        parameter = known[where]
        values = target_parameter(where)
        if "d2t" in names:
            offsets = whole(file, "d2t")
            ids = offsets.astype(np.int64) + np.arange(len(offsets))
            names = {"": names["d2t"]}
            values = jnp.take(values, ids, axis=parameter.axes.index("vocab"))
            parameter = dataclasses.replace(parameter, shape=values.shape)
        expected = {part: stored_shape(parameter, part) for part in dict(parameter.parts) or [""]}
        fits = expected == {part: file.shapes()[name] for part, name in names.items()}
        if not fits or not same(read_parameter(file, where, parameter, names, plus_one, values.sharding), values):
            found.update(names.values())
    return frozenset(found)


def read_target_parameter(folder: Path, config: ModelConfig, parameter: Parameter, where: str) -> jax.Array:
    """Read a parameter of a target from its folder, in the stored dtype. Raises: UserError where it is missing."""
    file = Shards(folder)
    names = hf(config.family).sources(where)
    for name in names.values():
        if name not in file.shapes():
            raise UserError(f"{folder}: tensor {name} is missing, and the head's folder has a copy of it")
    return read_parameter(file, where, parameter, names, FAMILIES[config.family].norm_plus_one)


def by_parameter(copies: Mapping[str, Place]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the parameters that tensors copy, each with the tensor of each part.

    The parts of a merged parameter come together. Several copies of another parameter come one by one.
    """
    merged: dict[str, dict[str, str]] = {}
    for name, (where, part) in copies.items():
        if part in ("", "d2t"):
            yield where, {part: name}
        else:
            merged.setdefault(where, {})[part] = name
    yield from merged.items()


def read_parameter(
    file: Shards,
    where: str,
    parameter: Parameter,
    names: Mapping[str, str],
    norm_plus_one: bool,
    sharding: Any = None,
) -> jax.Array:
    """Read one parameter in the stored dtype; norms in their own. names: the tensor of each part."""
    dtype = parameter.dtype if parameter.kind == "norm" else FLOATS[file.dtype(next(iter(names.values())))]
    parameter = dataclasses.replace(parameter, dtype=jnp.dtype(dtype), sharding=sharding)
    undo = edit(norm_plus_one)

    def read(part: str, index: Index) -> np.ndarray:
        return undo(parameter, part, file.read(names[part], index))

    return place(where, parameter, copying(parameter, read))


def layers(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json for a head's layers, which have the form of Llama's or Qwen3's."""
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": next(theirs for theirs, own in ACTIVATIONS.items() if own == config.activation),
        "tie_word_embeddings": False,
    }


def tensors(
    known: Mapping[str, Parameter], params: Mapping[str, jax.Array], names: Mapping[str, Place]
) -> dict[str, np.ndarray]:
    """Return the parameters as tensors in the form that `load` reads.

    known: declarations of the parameters; names: the place of each tensor.
    """

    def stored(where: str, part: str) -> np.ndarray:
        x = np.asarray(params[where])
        columns = dict(known[where].parts)
        if part:
            order = list(columns)
            start = sum(columns[name] for name in order[: order.index(part)])
            groups = x.reshape(*x.shape[:-1], -1, sum(columns.values()))
            x = groups[..., start : start + columns[part]].reshape(*x.shape[:-1], -1)
        return np.ascontiguousarray(np.moveaxis(x, 0, -1) if known[where].kind == "matrix" else x)

    return {name: stored(*place) for name, place in names.items() if place[0] in params}


def save(folder: Path, config: Mapping[str, Any], named: Mapping[str, np.ndarray], fingerprint: str) -> None:
    """Write a head's folder, or replace these files of an existing one.

    config: content of config.json; named: the tensors; fingerprint: digest of the target's tokenizer.
    """
    with appearing(folder, replaced=("model.safetensors", "config.json", FINGERPRINT)) as partial:
        save_file(dict(named), partial / "model.safetensors")
        (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (partial / FINGERPRINT).write_text(fingerprint + "\n", encoding="utf-8")


def id_tables(folder: Path, target_ids: np.ndarray, abstract: Mapping[str, Parameter]) -> dict[str, jax.Array]:
    """Return d2t and t2d of a reduced vocabulary, given the target's id for each of the head's own ids.

    t2d holds the head's own id for each of the target's, or the number of own ids where the head has none.
    """
    own, all_ids = abstract["d2t"].shape[0], abstract["t2d"].shape[0]
    check_ids(folder, target_ids, all_ids)
    own_ids = np.full(all_ids, own)
    own_ids[target_ids] = np.arange(own)
    tables = {"d2t": target_ids, "t2d": own_ids}
    return {name: jax.device_put(jnp.asarray(x, jnp.int32), abstract[name].sharding) for name, x in tables.items()}


def check_ids(folder: Path, target_ids: np.ndarray, all_ids: int) -> None:
    """Raise UserError unless these are distinct ids of a target with `all_ids` ids."""
    if target_ids.min() < 0 or target_ids.max() >= all_ids or len(np.unique(target_ids)) < len(target_ids):
        raise UserError(f"{folder}: d2t names ids twice, or beyond the target's {all_ids}: it is for another target")
