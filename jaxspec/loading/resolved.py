"""Names of models, resolved: all that is known of a model before its weights are read."""

from __future__ import annotations

import dataclasses
import fnmatch

import checkpoints
from checkpoints import heads, names
from checkpoints.reading import told
from checkpoints.safetensors import heads_within
from jaxspec.common.errors import UserError
from jaxspec.drafters import methods
from jaxspec.drafters.heads import Found, flattened
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters
from jaxspec.models.reading import Reading
from jaxspec.models.sharding import for_degree
from jaxspec.options.speculative import SpeculativeConfig


@dataclasses.dataclass(frozen=True)
class ResolvedModel:
    """A model whose name was looked up, and whose configuration was parsed, once.

    config: of a head, what it is beside its target.
    reading: how the checkpoint of a head is read; None for a model of its own.
    target: of a draft, the model that it is to draft for.
    method: of a draft, the method that was asked for; None for whichever its checkpoint is for.
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
        """Whether a draft stands in the checkpoint of its target."""
        return self.target is not None and self.source.path == self.target.source.path


def resolved(source: checkpoints.Source) -> ResolvedModel:
    """Parse the configuration of a model. Raises as `checkpoints.load_config` does."""
    return ResolvedModel(source, checkpoints.load_config(source))


def asked_draft(speculative: SpeculativeConfig | None, target: ResolvedModel) -> ResolvedModel | None:
    """Resolve the draft that speculation asks for; None where that has no parameters. Raises as `resolved_draft`."""
    if speculative is None or not speculative.has_parameters:
        return None
    source = target.source
    if speculative.model:
        source = checkpoints.resolve(speculative.model, revision=speculative.revision)
    return resolved_draft(source, target, speculative.method)


def resolved_draft(source: checkpoints.Source, target: ResolvedModel, method: str | None = None) -> ResolvedModel:
    """Find out what a draft is beside its target. method: the one that it should be for.

    Raises: UserError where it is for another method or does not fit, else as `checkpoints.load_config` does.
    """
    reading = read(source, target, method)
    config = reading.config if reading else checkpoints.load_config(source)
    return ResolvedModel(source, config, reading, target, method)


def reread(draft: ResolvedModel, differing: frozenset[str]) -> ResolvedModel:
    """Resolve a head again, now that some of its copies of the target's tensors are known to differ from these."""
    assert draft.target is not None
    reading = read(draft.source, draft.target, draft.method, differing)
    assert reading is not None
    return dataclasses.replace(draft, config=reading.config, reading=reading)


def read(
    source: checkpoints.Source, target: ResolvedModel, method: str | None, differing: frozenset[str] = frozenset()
) -> Reading | None:
    """Find out how a head is read; None for a draft that is a model of its own. differing: as `Found` has it."""
    raw, shapes = heads.contents(source.path) if source.kind == "hf" else ({}, {})
    found, wanted = methods.of_checkpoint(raw, shapes), methods.split(method)[1] if method else None
    inner = methods.within(shapes)
    if wanted and methods.METHODS[wanted].parameters == "target":
        found = wanted
    elif not wanted and found == "draft_model" and inner and as_large(checkpoints.load_config(source), target.config):
        found = inner  # a draft as large as its target would gain nothing: its heads are meant
    if wanted not in (None, found):
        raise UserError(f"method={wanted!r}, but {source.name!r} is a checkpoint of method {found!r}: leave method out")
    if methods.METHODS[found].parameters == "model":
        return None
    beside = for_degree(target.config, 1)
    parse = checkpoints.parse_layers
    checkpoint = Found(source.name, flattened(raw), shapes, beside, target.name, parse, differing=differing)
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
