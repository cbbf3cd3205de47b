"""Drafts: how one is read beside its target, and whether it fits."""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
import re
from collections.abc import Callable
from typing import Any

import jax

import checkpoints
from checkpoints import heads, names
from checkpoints.reading import told
from checkpoints.safetensors import heads_within
from jaxspec.common.errors import MisfitError, UserError
from jaxspec.drafters import methods
from jaxspec.drafters.heads import Found, flattened
from jaxspec.loading.weights import load
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import abstract_params, parameters
from jaxspec.models.model import Model
from jaxspec.models.reading import Reading
from jaxspec.models.sharding import check_divides, for_degree
from jaxspec.options.speculative import SpeculativeConfig
from pallas_kernels.weights import dense

logger = logging.getLogger(__name__)


def draft_source(source: checkpoints.Source, speculative: SpeculativeConfig) -> checkpoints.Source:
    """source: the target's, within which the draft may be."""
    if not speculative.model:
        return source
    return checkpoints.resolve(speculative.model, revision=speculative.revision)


def draft_config(
    source: checkpoints.Source, target: ModelConfig, target_name: str, method: str | None = None
) -> ModelConfig:
    """Of the draft that `load_draft` would load, without its weights."""
    reading = read_draft(source, target, target_name, method)
    return checkpoints.load_config(source) if reading is None else reading.config


def load_draft(
    source: checkpoints.Source,
    dtype: Any,
    placement: Any,
    target: Model,
    target_name: str,
    method: str | None = None,
    *,
    within: bool = False,
) -> Model:
    """A draft for this target, of whichever method it is; method: the one it should be, or None; within: whether it
    stands in the target's own checkpoint.

    Raises: UserError where it is for another method or does not fit, else as loading does.
    """
    theirs = lambda name: dense(target.params[name])
    reading = read_beside(source, target.config, target_name, theirs, method, within=within)
    if reading is None:
        return load(source, dtype, placement, target)
    if reading.remark:
        logger.warning("%s", reading.remark)
    check_divides(reading.config, placement.degree, of_draft=True)
    abstract = abstract_params(reading.config, dtype, placement)
    return Model(reading.config, heads.load(source.path, reading, abstract))


def read_beside(
    source: checkpoints.Source,
    target: ModelConfig,
    target_name: str,
    theirs: Callable[[str], jax.Array],
    method: str | None = None,
    *,
    within: bool = False,
) -> Reading | None:
    """Read a head as `read_draft` does, and compare its copies of the target's tensors with these. A copy that differs
    is used where the head has a use for it, and refused elsewhere. theirs(name): a parameter of the target."""
    reading, known = read_draft(source, target, target_name, method), parameters(target)
    if reading is None:
        return None
    own = names.hf(target.family).places if within else ()
    copies = {name: place for name, place in reading.copies.items() if re.sub(r"\d+", "{}", name) not in own}
    if not (differing := heads.differing(source.path, copies, target, known, theirs)):
        return reading
    reading = read_draft(source, target, target_name, method, differing=differing)
    if reading and (refused := sorted(differing - reading.names.keys())):
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise MisfitError(
            f"the draft {source.name!r} was made beside another target than {target_name!r}: its tensor {refused[0]}"
            f"{more} differs from the target's, which is used in its place; give it the target that it was trained for"
        )
    return reading


def read_draft(
    source: checkpoints.Source,
    target: ModelConfig,
    target_name: str,
    method: str | None = None,
    *,
    differing: frozenset[str] = frozenset(),
) -> Reading | None:
    """How a head beside this target is read; None for a draft that is a model of its own. differing: as `Found` has it.
    Raises as `load_draft`."""
    raw, shapes = heads.contents(source.path) if source.kind == "hf" else ({}, {})
    found, wanted = methods.of_checkpoint(raw, shapes), methods.split(method)[1] if method else None
    inner = methods.within(shapes)
    if wanted and methods.METHODS[wanted].parameters == "target":
        found = wanted
    elif not wanted and found == "draft_model" and inner and as_large(checkpoints.load_config(source), target):
        found = inner  # a draft as large as its target would gain nothing: its heads are meant
    if wanted not in (None, found):
        raise UserError(f"method={wanted!r}, but {source.name!r} is a checkpoint of method {found!r}: leave method out")
    if methods.METHODS[found].parameters == "model":
        return None
    beside = for_degree(target, 1)
    checkpoint = Found(
        source.name, flattened(raw), shapes, beside, target_name, checkpoints.parse_layers, differing=differing
    )
    with told(source.path):
        reading = methods.implementation(found).read(checkpoint)
    return with_rest(reading, beside) if reading.rest else reading


def as_large(draft: ModelConfig, target: ModelConfig) -> bool:
    """Whether the draft has the target's layers."""
    return (draft.num_layers, draft.width) == (target.num_layers, target.width)


def with_rest(reading: Reading, target: ModelConfig) -> Reading:
    """Add the tensors of the model in whose checkpoint a head stands. They should be the target's, or other heads'."""
    table, rest = names.hf(target.family), set(reading.rest)
    places = {name: (where, part) for where in parameters(target) for part, name in table.sources(where).items()}
    if target.tied:
        places |= dict.fromkeys(table.sources("head").values(), ("embed", ""))
    copies = {name: place for name, place in places.items() if name in rest}
    others = [name for pattern in (*table.frequencies, *heads_within(rest)) for name in fnmatch.filter(rest, pattern)]
    return dataclasses.replace(reading, copies={**copies, **reading.copies}, ignored=(*reading.ignored, *others))


def check_same_tokenizer(source: Any, tokenizer: Any, draft_source: Any) -> None:
    """A draft must mean the same by an id. Vocabularies padded to different sizes are fine. A head that brings no
    tokenizer is for its target's, as far as can be known."""
    if (wanted := checkpoints.load_fingerprint(draft_source)) is not None:
        if wanted != (found := checkpoints.fingerprint(tokenizer)):
            raise UserError(
                f"the draft {draft_source.name!r} was trained for another tokenizer than that of the target "
                f"{source.name!r} (fingerprint {wanted[:12]}, found {found[:12]}): train one for this target"
            )
        return
    if not checkpoints.has_tokenizer(draft_source):
        return
    mine, theirs = tokenizer.get_vocab(), checkpoints.load_tokenizer(draft_source).get_vocab()
    if mine != theirs:
        tokens = mine.keys() | theirs.keys()
        differing = sum(mine.get(token) != theirs.get(token) for token in tokens)
        raise UserError(
            f"the draft {draft_source.name!r} has another tokenizer than the target {source.name!r} "
            f"({differing} of {len(tokens)} tokens differ): choose a draft of the same family"
        )
