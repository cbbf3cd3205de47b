"""Resolved models: all that is known of a model or a draft before its weights are read."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable

import checkpoints
from checkpoints import head_folders, names
from checkpoints.assemble import together
from checkpoints.reading import naming_file
from checkpoints.safetensors import heads_within
from jaxspec.common.errors import UserError
from jaxspec.drafters import methods
from jaxspec.drafters.head_checkpoint import HeadCheckpoint, flattened
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters
from jaxspec.models.reading import Reading
from jaxspec.models.sharding import for_degree
from jaxspec.options.speculative import SpeculativeConfig


@dataclasses.dataclass(frozen=True)
class ResolvedModel:
    """A model or a draft whose checkpoint was found and whose configuration was parsed.

    source: the checkpoint.
    config: the configuration; that of a drafting head depends on its target.
    reading: the way to read the checkpoint of a drafting head; None for a complete model.
    target: the target of a draft; None for a model that is no draft.
    method: the drafting method that the user named; None for the method that the checkpoint is for.
    """

    source: checkpoints.Source
    config: ModelConfig
    reading: Reading | None = None
    target: ResolvedModel | None = None
    method: str | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def within(self) -> bool:
        """Return whether a draft is part of its target's checkpoint."""
        return self.target is not None and self.source.path == self.target.source.path


def resolved(source: checkpoints.Source) -> ResolvedModel:
    """Parse the configuration of a model's checkpoint. Raises errors as `checkpoints.load_config` does."""
    return ResolvedModel(source, checkpoints.load_config(source))


def asked_draft(speculative: SpeculativeConfig | None, target: ResolvedModel) -> ResolvedModel | None:
    """Resolve the draft that the options name; None if they name none with parameters. Raises as `resolved_draft`."""
    if speculative is None or not speculative.has_parameters:
        return None
    source = target.source
    if speculative.model:
        source = checkpoints.resolve(speculative.model, revision=speculative.revision)
    return resolved_draft(source, target, speculative.method)


def resolved_draft(source: checkpoints.Source, target: ResolvedModel, method: str | None = None) -> ResolvedModel:
    """Parse the configuration of a draft for its target.

    method: drafting method that the user named; None for the method that the checkpoint is for.

    Raises: UserError if the checkpoint is for another method or does not fit the target, other errors as
      `checkpoints.load_config` does.
    """
    own_config = functools.cache(functools.partial(checkpoints.load_config, source))
    reading = read(source, own_config, target, method)
    return ResolvedModel(source, reading.config if reading else own_config(), reading, target, method)


def reread(draft: ResolvedModel, differing: frozenset[str]) -> ResolvedModel:
    """Parse a drafting head's configuration again, now that some of its copies of target tensors prove different.

    differing: names of the copies in the head's checkpoint that differ from the target's tensors.
    """
    assert draft.target is not None
    own_config = functools.partial(checkpoints.load_config, draft.source)
    reading = read(draft.source, own_config, draft.target, draft.method, differing)
    assert reading is not None
    return dataclasses.replace(draft, config=reading.config, reading=reading)


def read(
    source: checkpoints.Source,
    own_config: Callable[[], ModelConfig],
    target: ResolvedModel,
    method: str | None,
    differing: frozenset[str] = frozenset(),
) -> Reading | None:
    """Return how the checkpoint of a drafting head is read; None for a draft that is a complete model.

    own_config: function that parses the configuration of a draft that is a complete model.
    method: drafting method that the user named; None for the method that the checkpoint is for.
    differing: names of copies of target tensors in the head's checkpoint that are known to differ from the target.
    Raises errors as `resolved_draft` does.
    """
    raw, shapes = head_folders.contents(source.path) if source.kind == "hf" else ({}, {})
    found = methods.of_checkpoint(raw, shapes)
    wanted = methods.split(method)[1] if method else None
    inner = methods.within(shapes)  # the method of a head within a model's checkpoint
    if wanted and methods.METHODS[wanted].parameters == "target":
        found = wanted
    elif not wanted and found == "draft_model" and inner and same_size(own_config(), target.config):
        found = inner  # a draft as large as its target would gain nothing, so the head in its checkpoint is meant
    if wanted not in (None, found):
        raise UserError(f"method={wanted!r}, but {source.name!r} is a checkpoint of method {found!r}: leave method out")
    if methods.METHODS[found].parameters == "model":
        return None
    beside = for_degree(target.config, 1)
    checkpoint = HeadCheckpoint(
        source.name, flattened(raw), shapes, beside, target.name, checkpoints.parse_layers, differing=differing
    )
    with naming_file(source.path):
        reading = methods.implementation(found).read(checkpoint)
    return with_model_tensors(reading, beside) if reading.rest else reading


def same_size(draft: ModelConfig, target: ModelConfig) -> bool:
    """Return whether draft and target have the same number of layers and the same width."""
    return (draft.num_layers, draft.width) == (target.num_layers, target.width)


def with_model_tensors(reading: Reading, target: ModelConfig) -> Reading:
    """Return the reading of a head within a whole model's checkpoint, extended by the model's tensors (`Reading.rest`).

    Tensors that the target has, too, become copies, which are compared with the target. Tensors of other heads are
    ignored.
    """
    table = names.hf_of(target)
    rest = set(reading.rest)
    places: dict[str, tuple[str, str]] = {}
    for where in parameters(target):
        places |= {name: (where, "+".join(parts)) for name, parts in together(table.sources(where)).items()}
    if target.tied:
        places |= dict.fromkeys(table.sources("head").values(), ("embed", ""))
    copies = {name: place for name, place in places.items() if name in rest}
    patterns = (*table.frequencies, *table.ignored, *heads_within(rest))
    others = [name for pattern in patterns for name in fnmatch.filter(rest, pattern)]
    return dataclasses.replace(reading, copies={**copies, **reading.copies}, ignored=(*reading.ignored, *others))
