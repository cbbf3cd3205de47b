"""Heads in the format of the speculators library, as its version 0.9.0 reads them: a config.json that names the target,
the layers' own configuration within it, and tensors.

That library takes embedding table and head from the target, but for EAGLE-3: there what a folder lacks stays undefined,
so copies stand in the folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from checkpoints import heads
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
TOKENS = 3  # drafts of a round, where the head tells neither a number nor a limit


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of head there.

    architecture: what config.json calls it; said: key of config.json -> field of the head's configuration.
    copies: whether the target's table, and its head where the head has none, have to stand in its folder.
    """

    architecture: str
    said: Mapping[str, str]
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
METHODS = ("eagle3", "dflash", "dspark")  # of `jaxspec.drafters.methods`: those of KINDS

# How other writers begin a tensor's name -> how it begins there.
STARTS = {
    "midlayer.": "layers.0.",
    **{f"aux_norm_{name}.": f"fc_norm.{i}." for i, name in enumerate(("low", "mid", "high"))},
}
TABLE, HEAD = "embed_tokens.weight", "lm_head.weight"
# DSpark's table of the token before: what makes it of the target's, and as it is there.
OWN_TABLE, THEIR_TABLE = "markov_head.embed_in.weight", "markov_head.markov_w1.weight"
CONFIDENCE = "confidence_head."  # of DSpark, which jaxspec does not read


def kind(head: Any) -> str:
    """The name in KINDS of a head of this configuration, whose method is one of METHODS."""
    method = draft_spec(head).method
    return "peagle" if method == "eagle3" and head.mask_id is not None else method


def check(name: str, head: Any, target: ModelConfig) -> None:
    """Raises UnsupportedError for what that library has no way to say of a head beside this target; name, head: what to
    call it, and its configuration."""
    blocks, taps, reduced = not KINDS[kind(head)].copies, list(head.taps), head.reduced_vocab_size
    refusals = (  # whether it is so, what it has, what could be read
        (head.width != target.width, f"width {head.width}", f"the target's width, {target.width}"),
        (len(set(taps)) < len(taps), f"layers {taps} to read", "each layer of the target once"),
        (reduced == target.vocab_size, f"d2t for all {reduced} ids", "fewer ids, or all in the target's order"),
        (head.rare_vocab_size, f"a narrower way to {head.rare_vocab_size} rare ids", "one way to all"),
        (head.qkv_bias, "biases of queries, keys and values", "layers without"),
        (not blocks and head.norm_before_fc and head.norm_taps, "norm_before_fc and fc_norm", "one of the two"),
        (blocks and not head.qk_norm, "layers without norms of queries and keys", "layers of Qwen3's kind"),
        (blocks and head.has_table, "a table of its own", "the target's"),
        (blocks and head.has_head and not reduced, "a head of its own over all ids", "the target's, or one over fewer"),
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
    """What config.json says of the target: a hub id, or the place of a folder on this machine."""
    name = target.name if "/" in target.name else str(target.path)  # a folder's own name alone would not find it
    return {"name_or_path": name, "architectures": read_json(target.path / "config.json").get("architectures") or []}


def config(
    head: Any, shapes: Mapping[str, tuple[int, ...]], target: Source, rope: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of a head.

    head: its configuration; shapes: of its tensors there; target: the checkpoint that it drafts for; rope: what a
    config.json says of its layers' rotary embedding; before: what one of this format said already, of proposals.
    """
    name = kind(head)
    proposals = {
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_spec(head).max_drafts or TOKENS}],
        "default_proposal_method": "greedy",
    }
    confidence = shapes.get(f"{CONFIDENCE}proj.weight", (0,))[-1]
    switches = {"enable_confidence_head": confidence > 0, "confidence_head_with_markov": confidence > head.width}
    kept = {key: before[key] for key in proposals if proposals.keys() <= before.keys()}
    return {
        "speculators_model_type": name,
        "speculators_version": VERSION,
        "architectures": [KINDS[name].architecture],
        "draft_vocab_size": head.head_size,
        **{key: getattr(head, field) for key, field in KINDS[name].said.items()},
        **(switches if name == "dspark" else {}),
        "tie_word_embeddings": False,
        "transformer_layer_config": {**heads.layers(head), "attention_bias": False, **rope},
        "speculators_config": {"algorithm": name, **proposals, **kept, "verifier": verifier(target)},
    }


def renamed(name: str) -> str:
    """As a tensor of this name is called there."""
    name = name.removeprefix("model.")
    start = next((start for start in STARTS if name.startswith(start)), "")
    return STARTS.get(start, "") + name.removeprefix(start)


def tensors(
    source: Source, how: heads.Reading, known: Mapping[str, Parameter], target: Source, of_target: ModelConfig
) -> dict[str, np.ndarray]:
    """All tensors of a head's folder, as they are stored but for their names; known: its parameters.

    d2t i64[_] holds what is added to an own id, t2d bool[V] which of the target's ids it has.
    Raises: UserError where one is missing, or d2t is for another target; else as reading does.
    """
    file, table = Shards(source.path), heads.table_of(how)
    stored = {where: p for where, p in known.items() if where != "t2d"}
    check_tensors(how.config, stored, table, file)
    wanted = [name for where in stored for name in table.sources(where).values()]
    wanted += [name for name in file.shapes() if name.startswith(CONFIDENCE)]
    found = {renamed(name): heads.whole(file, name) for name in wanted}
    if OWN_TABLE in found:
        way = found.pop(OWN_TABLE)
        channels = copies({TABLE}, target, of_target, np.float32)[TABLE] @ way.astype(np.float32).T
        found[THEIR_TABLE] = channels.astype(way.dtype)
    if "d2t" in found:
        ids = found["d2t"].astype(np.int64) + np.arange(len(found["d2t"]))
        heads.check_ids(source.path, ids, of_target.vocab_size)
        heads.check_t2d(file, ids, of_target.vocab_size)
        found |= {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(of_target.vocab_size), ids)}
    if KINDS[kind(how.config)].copies:
        own = [name for name in file.shapes() if renamed(name) == TABLE]
        found |= {renamed(name): heads.whole(file, name) for name in own}
        found |= copies({TABLE, HEAD} - found.keys(), target, of_target, found["fc.weight"].dtype)
    return found


def copies(names: Set[str], target: Source, of_target: ModelConfig, dtype: Any) -> dict[str, np.ndarray]:
    """The target's table and head, as far as these names ask for them. Raises: UserError where it lacks one."""
    file, where = Shards(target.path), {TABLE: "embed", HEAD: "embed" if of_target.tied else "head"}
    theirs = {name: hf(of_target.family).sources(where[name])[""] for name in names}
    for name in theirs.values():
        if name not in file.shapes():
            raise UserError(f"{target.path}: tensor {name} is missing: the head's folder needs a copy of it")
    return {name: heads.whole(file, there).astype(dtype) for name, there in theirs.items()}
