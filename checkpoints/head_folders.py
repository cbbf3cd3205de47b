"""Folders of drafting heads: a config.json and tensors, whose meaning depends on the drafting method."""

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

from checkpoints import eight_bits, forms, published, published_forms
from checkpoints.assemble import Edit, Keep, assemble, copying, expected_shape, place, together, unchanged, within
from checkpoints.copies import same
from checkpoints.edits import edit, rotary_order
from checkpoints.eight_bit_tensors import FLOATS
from checkpoints.hf_config import ACTIVATIONS
from checkpoints.names import Table, hf_of
from checkpoints.orbax import FINGERPRINT, appearing
from checkpoints.reading import is_regular_file, read_config
from checkpoints.safetensors import Shards
from checkpoints.sources import TOKENIZER_FILES
from checkpoints.tensor_file import Index
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.families import FAMILIES, Place
from jaxspec.models.parameters import Parameter
from jaxspec.models.reading import Reading
from jaxspec.options.quantization import Quantization
from pallas_kernels.weights import AnyWeight, Weight, dense


def contents(folder: Path) -> tuple[dict[str, Any], Mapping[str, tuple[int, ...]]]:
    """Return the content of a folder's config.json ({} if there is none), and the shapes of its tensors by name.

    Raises as `checkpoints.safetensors.Shards` does.
    """
    path = folder / "config.json"
    config = read_config(path) if is_regular_file(path) else {}
    return config, Shards(folder).shapes()


def convert(folder: Path, dst: Path, dtype: str | None = None, weight_bits: int | None = None) -> None:
    """Write a copy of a drafting head's folder to the folder `dst`, with its tensors in the safetensors format.

    dtype, weight_bits: as in `write`.
    Raises as `checkpoints.safetensors.Shards` does.
    """
    shards = Shards(folder)
    tensors = {name: whole(shards, name) for name in shards.shapes()}
    raw = contents(folder)[0] if shards.published else {}  # the copy of a head that is published in 8 bits has floats
    config = {key: value for key, value in raw.items() if key not in published.KEYS} or None
    write(dst, tensors, folder, dtype, config, weight_bits=weight_bits)


def whole(shards: Shards, name: str) -> np.ndarray:
    """Read a whole tensor in its stored dtype, or dequantised."""
    return shards.read(name, (slice(None),) * len(shards.shapes()[name]))


def write(
    dst: Path,
    tensors: Mapping[str, np.ndarray],
    folder: Path,
    dtype: str | None = None,
    config: Mapping[str, Any] | None = None,
    weight_bits: int | None = None,
) -> None:
    """Write these tensors to a Hugging Face folder `dst`, and copy configuration and tokenizer files of `folder`.

    dtype: name of the dtype that float tensors are converted to; None keeps their dtypes.
    config: content of config.json; None copies the config.json of `folder`.
    weight_bits: 8 to store matrices as integers and scales (`checkpoints.eight_bits`); None to store floats.
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
            if not path.name.endswith(".index.json"):  # an index of shards is not copied, as there is one file now
                shutil.copyfile(path, partial / path.name)
        if config is not None:
            (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def table_of(reading: Reading) -> Table:
    """Return the table of a drafting head's tensor names.

    Copies of the target's tensors, and norms whose weights must be 1, are ignored: other functions check these tensors.
    """
    ignored = (*reading.ignored, *reading.copies, *reading.ones)
    return Table(dict(reading.names), ignored, repeats=reading.repeats, tied_by="tie_weights")


def stored_forms(folder: Path, reading: Reading, known: Mapping[str, Parameter]) -> dict[str, Quantization]:
    """Return the form in memory of each parameter of a head that stays in 8 bits, as `checkpoints.stored_forms` does.

    reading, known: as in `load`.
    """
    return published_forms.forms(published.of_folder(folder), table_of(reading), known)


def load(
    folder: Path,
    reading: Reading,
    abstract: Mapping[str, Parameter],
    *,
    keep: Keep = unchanged,
    progress: bool = True,
) -> dict[str, Any]:
    """Load the parameters of a drafting head.

    With a reduced vocabulary these include d2t and t2d, which map the head's token ids to the target's and back.

    reading: configuration and tensor names of the head's checkpoint.
    abstract: declarations of the parameters, by name.
    keep, progress: as in `checkpoints.load_params`.
    Raises as `checkpoints.load_params` does; UserError for tensors that contradict each other.
    """
    file = Shards(folder)
    stored = {name: p for name, p in abstract.items() if name != "t2d"}  # the parameter t2d follows from d2t
    undo = edit(reading.norm_plus_one)
    params = assemble(reading.config, stored, table_of(reading), file, edit=undo, keep=keep, progress=progress)
    check_ones(reading, file)
    target_ids = np.arange(reading.config.vocab_size)  # the target's token id for each of the head's ids
    if "t2d" in abstract:
        target_ids = np.asarray(params["d2t"], np.int64)
        if not reading.absolute_ids:
            target_ids = target_ids + np.arange(len(target_ids))
        params |= id_tables(folder, target_ids, abstract)
    check_t2d(file, target_ids, reading.config.vocab_size)
    return params


def check_ones(reading: Reading, file: Shards) -> None:
    """Raise UnsupportedError if the file has a norm that the head's architecture lacks, with weights other than 1.

    reading: configuration and tensor names of the head's checkpoint; `reading.ones` names the norms.
    """
    for name in reading.ones:
        if name in file.shapes() and not (whole(file, name) == 1).all():
            method = draft_spec(reading.config).method
            raise UnsupportedError(
                f"{file.where}: tensor {name} is a norm, which a head of method {method!r} does not have: remove the "
                "tensor if it is not meant"
            )


def check_t2d(file: Shards, target_ids: np.ndarray, all_ids: int) -> None:
    """Raise UserError if the tensors t2d and d2t of a reduced vocabulary disagree about the target's ids in it.

    target_ids: the target's token ids according to d2t.
    all_ids: size of the target's vocabulary.
    """
    if "t2d" not in file.shapes():
        return
    found = whole(file, "t2d")
    wanted = np.isin(np.arange(all_ids), target_ids)
    if found.shape != wanted.shape or (found.astype(bool) != wanted).any():
        raise UserError(f"{file.where}: t2d and d2t do not hold the same ids: fetch it again")


def differing_copies(
    folder: Path,
    copies: Mapping[str, Place],
    target: ModelConfig,
    known: Mapping[str, Parameter],
    target_parameter: Callable[[str], AnyWeight],
) -> frozenset[str]:
    """Return the names of tensors in a drafting head's folder that should copy the target's parameters but differ.

    copies: for each tensor, the target's parameter and the part of it. Part "d2t" means only the ids in d2t, the head's
      reduced vocabulary.
    target: the target's configuration.
    known: declarations of the target's parameters, by name.
    target_parameter: function target_parameter(name) that returns the values of a parameter of the target.
    """
    file = Shards(folder)
    undo = edit(FAMILIES[target.family].norm_plus_one, rotary_order(target))
    found: set[str] = set()
    for where, names in by_parameter(copies, hf_of(target)):
        parameter = known[where]
        weight = target_parameter(where)
        values = dense(weight)
        if "d2t" in names:
            offsets = whole(file, "d2t")
            ids = offsets.astype(np.int64) + np.arange(len(offsets))
            names = {"": names["d2t"]}
            values = jnp.take(values, ids, axis=parameter.axes.index("vocab"))
            parameter = dataclasses.replace(parameter, shape=values.shape)
        tensors = together(names)
        fits = all(file.shapes().get(name) == expected_shape(parameter, parts) for name, parts in tensors.items())
        if not fits or not equal(read_parameter(file, where, parameter, names, undo, values.sharding), values, weight):
            found.update(copies.keys() & tensors)
    return frozenset(found)


def equal(x: jax.Array, values: jax.Array, weight: AnyWeight) -> bool:
    """Return whether x holds the values of a weight, or becomes these values when it is quantised as the weight was.

    values: the dequantised weight, or those of its outputs that x has.
    """
    form = forms.form_of(weight) if isinstance(weight, Weight) else None
    return bool(same(x, values) or (form and same(forms.rounded(x.astype(values.dtype), form), values)))


def read_target_parameter(folder: Path, config: ModelConfig, parameter: Parameter, where: str) -> jax.Array:
    """Read one parameter of a target from the target's folder, in the stored dtype.

    config: the target's configuration.
    where: name of the parameter.
    Raises: UserError where one of the parameter's tensors is missing.
    """
    file = Shards(folder)
    names = hf_of(config).sources(where)
    for name in names.values():
        if name not in file.shapes():
            raise UserError(f"{folder}: tensor {name} is missing, and the head's folder has a copy of it")
    undo = edit(FAMILIES[config.family].norm_plus_one, rotary_order(config))
    return read_parameter(file, where, parameter, names, undo)


def by_parameter(copies: Mapping[str, Place], table: Table) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the target's parameters of which a head's checkpoint has copies, each with the tensor name for each part.

    The parts of a merged parameter are yielded together. Several copies of an unmerged parameter are yielded one by
    one.

    copies: for each tensor, the target's parameter and the part of it.
    table: the target's tensor names, which the copies of merged parameters have, too.
    """
    merged: dict[str, None] = {}
    for name, (where, part) in copies.items():
        if part in ("", "d2t"):
            yield where, {part: name}
        else:
            merged[where] = None
    for where in merged:
        yield where, table.sources(where)


def read_parameter(
    file: Shards,
    where: str,
    parameter: Parameter,
    names: Mapping[str, str],
    undo: Edit,
    sharding: Any = None,
) -> jax.Array:
    """Read one parameter in the dtype in which it is stored, or a norm in the dtype of its declaration.

    where: name of the parameter.
    parameter: declaration of the parameter.
    names: tensor name for each part of the parameter.
    undo: function that `checkpoints.edits.edit` returns.
    sharding: sharding of the result; None for one device.
    """
    dtype = parameter.dtype if parameter.kind == "norm" else FLOATS[file.dtype(next(iter(names.values())))]
    parameter = dataclasses.replace(parameter, dtype=jnp.dtype(dtype), sharding=sharding)

    def read(part: str, index: Index) -> np.ndarray:
        return undo(parameter, part, file.read(names[part], within(parameter, names, part, index)))

    return place(where, parameter, copying(parameter, read))


def layers(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json keys that describe a drafting head's layers as those of a Llama or Qwen3 model."""
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
    """Return a drafting head's parameters as tensors in the layout that `load` reads.

    known: declarations of the parameters, by name.
    names: for each tensor, the parameter and the part of it that it holds. Parameters not in `params` are left out.
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
    """Write the folder of a drafting head. In an existing folder only the files written here are replaced.

    config: content of config.json.
    named: the tensors, by name.
    fingerprint: SHA-256 digest of the target's tokenizer.
    """
    with appearing(folder, replaced=("model.safetensors", "config.json", FINGERPRINT)) as partial:
        save_file(dict(named), partial / "model.safetensors")
        (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (partial / FINGERPRINT).write_text(fingerprint + "\n", encoding="utf-8")


def id_tables(folder: Path, target_ids: np.ndarray, abstract: Mapping[str, Parameter]) -> dict[str, jax.Array]:
    """Return the parameters d2t and t2d, which map the token ids of a reduced vocabulary to the target's and back.

    t2d holds the head's id for each of the target's ids. For an id that the head lacks, it is the number of head ids.

    target_ids: the target's id for each of the head's ids, the content of d2t. Raises as `check_ids` does.
    """
    own, all_ids = abstract["d2t"].shape[0], abstract["t2d"].shape[0]
    check_ids(folder, target_ids, all_ids)
    own_ids = np.full(all_ids, own)
    own_ids[target_ids] = np.arange(own)
    tables = {"d2t": target_ids, "t2d": own_ids}
    return {name: jax.device_put(jnp.asarray(x, jnp.int32), abstract[name].sharding) for name, x in tables.items()}


def check_ids(folder: Path, target_ids: np.ndarray, all_ids: int) -> None:
    """Raise UserError unless `target_ids` are distinct token ids of a target with `all_ids` ids."""
    if target_ids.min() < 0 or target_ids.max() >= all_ids or len(np.unique(target_ids)) < len(target_ids):
        raise UserError(
            f"{folder}: d2t repeats ids, or holds ids beyond the target's {all_ids}: use the target that the head "
            "was trained for"
        )
