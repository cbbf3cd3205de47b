"""Writing of drafting heads in the format of the speculators library, version 0.9.0.

A head's folder holds tensors and a config.json, which names the target and contains the configuration of the head's
layers. For DFlash and DSpark the library takes the embedding table and the output head from the target. For EAGLE-3 and
P-EAGLE the library leaves these two undefined if the folder lacks them, so the folder gets copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from checkpoints import head_folders
from checkpoints.assemble import check as check_tensors
from checkpoints.names import hf
from checkpoints.reading import read_json
from checkpoints.safetensors import Shards
from checkpoints.sources import Source
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.parameters import Parameter

VERSION = "0.9.0"
TOKENS = 3  # number of draft tokens per round, for a head whose configuration has neither this number nor a limit


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of drafting head in the speculators library.

    architecture: the library's name for the kind, in config.json's `architectures`.
    fields: for each key of config.json, the field of jaxspec's head configuration that gives its value.
    copies: whether the folder needs copies of the target's embedding table and output head, if the head has none.
    """

    architecture: str
    fields: Mapping[str, str]
    copies: bool = False


EAGLE3 = {
    "eagle_aux_hidden_state_layer_ids": "taps",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "fc_norm": "norm_taps",
    "norm_output": "norm_output",
}
DFLASH = {
    "aux_hidden_state_layer_ids": "taps",
    "block_size": "block_size",
    "mask_token_id": "mask_id",
    "sample_from_anchor": "from_pending",
}
KINDS = {
    "eagle3": Kind("Eagle3Speculator", EAGLE3, copies=True),
    "peagle": Kind("PEagleSpeculator", EAGLE3 | {"mask_token_id": "mask_id"}, copies=True),
    "dflash": Kind("DFlashSpeculator", DFLASH),
    "dspark": Kind("DSparkSpeculator", DFLASH | {"markov_rank": "markov_rank", "markov_head_type": "markov_kind"}),
}
METHODS = ("eagle3", "dflash", "dspark")  # the methods of `jaxspec.drafters.methods` whose heads can be written

# For each prefix of tensor names in other checkpoint formats, the speculators library's prefix.
STARTS = {
    "midlayer.": "layers.0.",
    **{f"aux_norm_{name}.": f"fc_norm.{i}." for i, name in enumerate(("low", "mid", "high"))},
}
TABLE, HEAD = "embed_tokens.weight", "lm_head.weight"
# Tensors of DSpark's embedding of the previous token. jaxspec stores a matrix that projects the target's embedding
# table; the speculators library stores the projected table.
OWN_TABLE, THEIR_TABLE = "markov_head.embed_in.weight", "markov_head.markov_w1.weight"
CONFIDENCE = "confidence_head."  # prefix of the DSpark tensors that jaxspec copies but does not use


def kind(head: Any) -> str:
    """Return the key of KINDS as which a drafting head is written: its method, or "peagle".

    The latter is EAGLE-3 with a mask token. head: jaxspec's configuration of the head, whose method is one of METHODS.
    """
    method = draft_spec(head).method
    return "peagle" if method == "eagle3" and head.mask_id is not None else method


def check(name: str, head: Any, target: ModelConfig) -> None:
    """Raise UnsupportedError for a drafting head that the speculators library cannot represent.

    name: the head's name for messages.
    head: the head's configuration.
    target: configuration of the model that the head drafts for.
    """
    blocks = not KINDS[kind(head)].copies
    taps = list(head.taps)
    reduced = head.reduced_vocab_size
    refusals = (  # triples: whether the reason applies, what the head has, what the speculators library supports
        (head.width != target.width, f"width {head.width}", f"the target's width, {target.width}"),
        (len(set(taps)) < len(taps), f"layers {taps} to read", "each layer of the target once"),
        (reduced == target.vocab_size, f"d2t for all {reduced} ids", "fewer ids, or all in the target's order"),
        (head.rare_vocab_size, f"a narrower way to {head.rare_vocab_size} rare ids", "one way to all"),
        (head.qkv_bias, "biases of queries, keys and values", "layers without"),
        (not blocks and head.norm_before_fc and head.norm_taps, "norm_before_fc and fc_norm", "one of the two"),
        (blocks and not head.qk_norm, "layers without norms of queries and keys", "layers of Qwen3's kind"),
        (blocks and head.has_table, "a table of its own", "the target's"),
        (blocks and head.has_head and not reduced, "a head of its own over all ids", "the target's, or one over fewer"),
        (blocks and target.embed_norm, "a table whose rows are normed", "the table as it is stored"),
        (any(head.windows), "layers with a sliding window", "layers without"),
        (
            blocks and target.embed_scale != 1.0,
            f"a table scaled by {target.embed_scale:g}",
            "the table as it is stored",
        ),
    )
    for found, what, only in refusals:
        if found:
            raise UnsupportedError(f"{name} has {what}: in a head of {kind(head)}, speculators {VERSION} reads {only}")


def verifier(target: Source) -> dict[str, Any]:
    """Return the entries for the target in a head's config.json: its architectures, and its hub id or folder's path."""
    name = target.name if "/" in target.name else str(target.path)  # a hub id, else a path that finds the folder
    return {"name_or_path": name, "architectures": read_json(target.path / "config.json").get("architectures") or []}


def config(
    head: Any, shapes: Mapping[str, tuple[int, ...]], target: Source, rope: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of config.json for a drafting head in the speculators library's format.

    head: the head's configuration.
    shapes: shapes of the head's tensors, by the library's names.
    target: the checkpoint that the head drafts for.
    rope: entries of config.json for the rotary embedding of the head's layers.
    before: object speculators_config of the head's original config.json, {} if there is none. Its proposal methods are
      kept if it names them and a default method.
    """
    name = kind(head)
    proposals = {
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_spec(head).max_drafts or TOKENS}],
        "default_proposal_method": "greedy",
    }
    confidence = shapes.get(f"{CONFIDENCE}proj.weight", (0,))[-1]
    switches = {"enable_confidence_head": confidence > 0, "confidence_head_with_markov": confidence > head.width}
    if proposals.keys() <= before.keys():
        proposals = {key: before[key] for key in proposals}
    return {
        "speculators_model_type": name,
        "speculators_version": VERSION,
        "architectures": [KINDS[name].architecture],
        "draft_vocab_size": head.head_size,
        **{key: getattr(head, field) for key, field in KINDS[name].fields.items()},
        **(switches if name == "dspark" else {}),
        "tie_word_embeddings": False,
        "transformer_layer_config": {**head_folders.layers(head), "attention_bias": False, **rope},
        "speculators_config": {"algorithm": name, **proposals, "verifier": verifier(target)},
    }


def renamed(name: str) -> str:
    """Return the speculators library's name for a tensor that has this name in another format."""
    name = name.removeprefix("model.")
    start = next((start for start in STARTS if name.startswith(start)), "")
    return STARTS.get(start, "") + name.removeprefix(start)


def tensors(
    source: Source,
    reading: head_folders.Reading,
    known: Mapping[str, Parameter],
    target: Source,
    of_target: ModelConfig,
) -> dict[str, np.ndarray]:
    """Return all tensors to write to a drafting head's folder, under the speculators library's names.

    The head's tensors keep their stored dtypes, except two for a reduced vocabulary. d2t i64[_] holds, for each
    of the head's token ids, the target's id minus the head's id. t2d bool[V] marks the target's ids that the head has.
    DSpark's tensor OWN_TABLE is converted to THEIR_TABLE.

    source: the head's folder.
    reading: configuration and tensor names of the head's checkpoint.
    known: declarations of the head's parameters, by name.
    target: the checkpoint that the head drafts for.
    of_target: the target's configuration.
    Raises: UserError where a tensor is missing, or d2t is for another target; else as `Shards` does.
    """
    file = Shards(source.path)
    table = head_folders.table_of(reading)
    stored = {where: p for where, p in known.items() if where != "t2d"}
    check_tensors(reading.config, stored, table, file)
    wanted = [name for where in stored for name in table.sources(where).values()]
    wanted += [name for name in file.shapes() if name.startswith(CONFIDENCE)]
    found = {renamed(name): head_folders.whole(file, name) for name in wanted}
    if OWN_TABLE in found:
        projection = found.pop(OWN_TABLE)
        table_of_target = copies({TABLE}, target, of_target, np.float32)[TABLE]
        found[THEIR_TABLE] = (table_of_target @ projection.astype(np.float32).T).astype(projection.dtype)
    if "d2t" in found:
        ids = found["d2t"].astype(np.int64) + np.arange(len(found["d2t"]))
        head_folders.check_ids(source.path, ids, of_target.vocab_size)
        head_folders.check_t2d(file, ids, of_target.vocab_size)
        found |= {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(of_target.vocab_size), ids)}
    if KINDS[kind(reading.config)].copies:
        own = [name for name in file.shapes() if renamed(name) == TABLE]
        found |= {renamed(name): head_folders.whole(file, name) for name in own}
        found |= copies({TABLE, HEAD} - found.keys(), target, of_target, found["fc.weight"].dtype)
    return found


def copies(names: Set[str], target: Source, of_target: ModelConfig, dtype: Any) -> dict[str, np.ndarray]:
    """Return copies of the target's embedding table, output head or both, converted to `dtype`.

    names: the speculators library's tensor names of the copies: TABLE, HEAD, both or none.
    Raises: UserError where the target lacks such a tensor.
    """
    file = Shards(target.path)
    where = {TABLE: "embed", HEAD: "embed" if of_target.tied else "head"}
    sources = {name: hf(of_target.family).sources(where[name])[""] for name in names}
    for source in sources.values():
        if source not in file.shapes():
            raise UserError(f"{target.path}: tensor {source} is missing: the head's folder needs a copy of it")
    return {name: head_folders.whole(file, source).astype(dtype) for name, source in sources.items()}
