"""Heads beside a target: a folder with a config.json and tensors, which the head's own method understands."""

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
from checkpoints.reading import read_config, there
from checkpoints.safetensors import FLOATS, Shards, edit
from checkpoints.sources import TOKENIZER_FILES
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.families import FAMILIES, Place
from jaxspec.models.parameters import Parameter
from jaxspec.models.reading import Reading


def contents(folder: Path) -> tuple[dict[str, Any], Mapping[str, tuple[int, ...]]]:
    """(config.json, {} where there is none; tensor -> shape). Raises as `checkpoints.safetensors` does."""
    path = folder / "config.json"
    return read_config(path) if there(path) else {}, Shards(folder).shapes()


def convert(folder: Path, dst: Path, dtype: str | None = None, weight_bits: int | None = None) -> None:
    """Writes a head's folder anew, its tensors in safetensors; dtype: of its floats, None as they are stored;
    weight_bits: as `write` takes it. Raises as `checkpoints.safetensors` does."""
    shards = Shards(folder)
    write(dst, {name: whole(shards, name) for name in shards.shapes()}, folder, dtype, weight_bits=weight_bits)


def whole(shards: Shards, name: str) -> np.ndarray:
    """A tensor as it is stored."""
    return shards.read(name, (slice(None),) * len(shards.shapes()[name]))


def write(
    dst: Path,
    tensors: Mapping[str, np.ndarray],
    folder: Path,
    dtype: str | None = None,
    config: Mapping[str, Any] | None = None,
    weight_bits: int | None = None,
) -> None:
    """A head's folder with these tensors, and what stands beside those of another one.

    dtype: of the floats, None as they are; config: config.json, None for that of `folder`; weight_bits: 8 for matrices
    of `eight_bits`, None for what dtype says.
    """
    if dtype is not None:
        floating = lambda x: x.dtype.kind not in "iub"
        tensors = {name: x.astype(jnp.dtype(dtype)) if floating(x) else x for name, x in tensors.items()}
    if weight_bits is not None:
        tensors = eight_bits.split(tensors)
    beside = [path for pattern in (*TOKENIZER_FILES, FINGERPRINT) for path in folder.glob(pattern) if there(path)]
    with appearing(dst) as partial:
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, partial / "model.safetensors")
        for path in beside:
            if not path.name.endswith(".index.json"):  # of the shards, which are one now
                shutil.copyfile(path, partial / path.name)
        if config is not None:
            (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def table_of(how: Reading) -> Table:
    """Return the names of a head's tensors. Its copies of the target's have been compared with these before."""
    return Table(dict(how.names), (*how.ignored, *how.copies, *how.ones), repeats=how.repeats, tied_by="tie_weights")


def load(
    folder: Path, how: Reading, abstract: Mapping[str, Parameter], *, progress: bool = True
) -> dict[str, jax.Array]:
    """The parameters, of a reduced vocabulary both ways of naming ids; how: a `Reading`. Raises as
    `checkpoints.load_params` does; UserError for tensors that contradict each other."""
    file, stored = Shards(folder), {name: p for name, p in abstract.items() if name != "t2d"}
    params = assemble(how.config, stored, table_of(how), file, edit=edit(how.norm_plus_one), progress=progress)
    check_ones(how, file)
    theirs = np.arange(how.config.vocab_size)
    if "t2d" in abstract:
        theirs = np.asarray(params["d2t"], np.int64)
        theirs = theirs if how.absolute_ids else theirs + np.arange(len(theirs))
        params |= both_ways(folder, theirs, abstract)
    check_t2d(file, theirs, how.config.vocab_size)
    return params


def check_ones(how: Reading, file: Shards) -> None:
    """Raises UnsupportedError for a norm that the head has no place for, unless it changes nothing."""
    for name in how.ones:
        if name in file.shapes() and not (whole(file, name) == 1).all():
            raise UnsupportedError(
                f"{file.where}: tensor {name} is a norm that a head of method {draft_spec(how.config).method!r} lacks: "
                "take it out where it is not meant"
            )


def check_t2d(file: Shards, theirs: np.ndarray, all_ids: int) -> None:
    """Raises UserError where t2d, which is found anew from d2t, does not name the target's ids that d2t does."""
    if "t2d" not in file.shapes():
        return
    found, wanted = whole(file, "t2d"), np.isin(np.arange(all_ids), theirs)
    if found.shape != wanted.shape or (found.astype(bool) != wanted).any():
        raise UserError(f"{file.where}: t2d does not name the ids that d2t does: fetch it again")


def differing(
    folder: Path,
    copies: Mapping[str, Place],
    target: ModelConfig,
    known: Mapping[str, Parameter],
    theirs: Callable[[str], jax.Array],
) -> frozenset[str]:
    """Return the tensors of a folder that are not what stands in their place, each compared as a whole.

    copies: tensor -> the target's parameter, and which part of it; "d2t": the ids that this names. known: the target's
    parameters; theirs(name): the numbers of one.
    """
    file, plus_one = Shards(folder), FAMILIES[target.family].norm_plus_one
    found: set[str] = set()
    for where, names in grouped(copies):
        parameter, their = known[where], theirs(where)
        if "d2t" in names:
            own = whole(file, "d2t")
            ids, axis = own.astype(np.int64) + np.arange(len(own)), parameter.axes.index("vocab")
            names, their = {"": names["d2t"]}, jnp.take(their, ids, axis=axis)
            parameter = dataclasses.replace(parameter, shape=their.shape)
        shapes = {part: stored_shape(parameter, part) for part in dict(parameter.parts) or [""]}
        fits = shapes == {part: file.shapes()[name] for part, name in names.items()}
        if not (fits and same(one(file, where, parameter, names, plus_one, their.sharding), their)):
            found.update(names.values())
    return frozenset(found)


def of_target(folder: Path, config: ModelConfig, parameter: Parameter, where: str) -> jax.Array:
    """Read a parameter of a target as its folder has it stored. Raises: UserError where it lacks that."""
    file, names = Shards(folder), hf(config.family).sources(where)
    for name in names.values():
        if name not in file.shapes():
            raise UserError(f"{folder}: tensor {name} is missing, and the head's folder has a copy of it")
    return one(file, where, parameter, names, FAMILIES[config.family].norm_plus_one)


def grouped(copies: Mapping[str, Place]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (parameter, part -> tensor): the parts of a merged one together, all others each alone."""
    merged: dict[str, dict[str, str]] = {}
    for name, (where, part) in copies.items():
        if part in ("", "d2t"):
            yield where, {part: name}
        else:
            merged.setdefault(where, {})[part] = name
    yield from merged.items()


def one(
    file: Shards,
    where: str,
    parameter: Parameter,
    names: Mapping[str, str],
    norm_plus_one: bool,
    sharding: Any = None,
) -> jax.Array:
    """Read one parameter as it is stored. names: part -> tensor."""
    dtype = parameter.dtype if parameter.kind == "norm" else FLOATS[file.dtype(next(iter(names.values())))]
    parameter, undo = dataclasses.replace(parameter, dtype=jnp.dtype(dtype), sharding=sharding), edit(norm_plus_one)
    read = lambda part, index: undo(parameter, part, file.read(names[part], index))
    return place(where, parameter, copying(parameter, read))


def layers(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of a head's layers, which are a Llama's or a Qwen3's."""
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
    """The parameters as tensors of these names: what `load` reads back."""

    def stored(where: str, part: str) -> np.ndarray:
        x, columns = np.asarray(params[where]), dict(known[where].parts)
        if part:
            order = list(columns)
            start = sum(columns[name] for name in order[: order.index(part)])
            groups = x.reshape(*x.shape[:-1], -1, sum(columns.values()))
            x = groups[..., start : start + columns[part]].reshape(*x.shape[:-1], -1)
        return np.ascontiguousarray(np.moveaxis(x, 0, -1) if known[where].kind == "matrix" else x)

    return {name: stored(*place) for name, place in names.items() if place[0] in params}


def save(folder: Path, config: Mapping[str, Any], named: Mapping[str, np.ndarray], fingerprint: str) -> None:
    """A head's folder, or these files of one; fingerprint: of its target's tokenizer."""
    with appearing(folder, replaced=("model.safetensors", "config.json", FINGERPRINT)) as partial:
        save_file(dict(named), partial / "model.safetensors")
        (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (partial / FINGERPRINT).write_text(fingerprint + "\n", encoding="utf-8")


def both_ways(folder: Path, theirs: np.ndarray, abstract: Mapping[str, Parameter]) -> dict[str, jax.Array]:
    """d2t and t2d of a reduced vocabulary, from the target's id of each of its own."""
    own, all_ids = abstract["d2t"].shape[0], abstract["t2d"].shape[0]
    check_ids(folder, theirs, all_ids)
    back = np.full(all_ids, own)
    back[theirs] = np.arange(own)
    place = lambda name, x: jax.device_put(jnp.asarray(x, jnp.int32), abstract[name].sharding)
    return {"d2t": place("d2t", theirs), "t2d": place("t2d", back)}


def check_ids(folder: Path, theirs: np.ndarray, all_ids: int) -> None:
    """Raises UserError for what are not different ids of a target with so many."""
    if theirs.min() < 0 or theirs.max() >= all_ids or len(np.unique(theirs)) < len(theirs):
        raise UserError(f"{folder}: d2t names ids twice, or beyond the target's {all_ids}: it is for another target")
