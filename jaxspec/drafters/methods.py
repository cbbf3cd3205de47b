"""The drafting methods by name: the one place that lists them. Plain data, so that options can be checked against it.

A method is a line here and a file of this folder by its name. `drafter(k, most, models, speculative)` there makes the
drafter of k tokens a round, in an engine whose rounds have at most `most`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from jaxspec.common.errors import UnsupportedError, quoted


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of drafting. The file of a head's method also has `read(found)`, which says of a checkpoint what its
    configuration is and where its tensors go (`jaxspec.drafters.heads`).

    parameters: what has them: a whole "model", a "head" beside its target, the "target"'s own checkpoint, or nothing.
    signs: shell patterns of tensors, or architectures, that only its checkpoints have.
    """

    parameters: Literal["model", "head", "target"] | None
    signs: tuple[str, ...] = ()


METHODS = {
    "draft_model": Method("model"),
    "ngram": Method(None),
    "suffix": Method(None),
    # The first whose sign is found counts.
    "dspark": Method("head", ("markov_head.*", "confidence_head.*", "*DSpark*")),
    "dflash": Method("head", ("hidden_norm.weight",)),
    "eagle3": Method("head", ("d2t", "*midlayer.*", "*layers.0.hidden_norm.weight")),
    "eagle": Method("head", ("fc.weight", "model.fc.weight")),
    "medusa": Method("head", ("0.0.linear.weight", "medusa_head.*", "medusa_heads.*", "blocks.0.layers.*")),
    "mlp_speculator": Method("head", ("speculator.*",)),
    "mtp": Method("target", ("*.eh_proj.weight", "model.mtp_layers.*", "mtp.fc.weight")),
}
LOOKUP = "ngram+"  # before a method's name: prompt lookup where it finds something, that method elsewhere
NAMES = (*METHODS, *(LOOKUP + name for name, method in METHODS.items() if method.parameters))


def split(name: str) -> tuple[bool, str]:
    """(whether prompt lookup goes first, the method): of "ngram+draft_model" (True, "draft_model")."""
    return name.startswith(LOOKUP), name.removeprefix(LOOKUP)


def of_checkpoint(raw: Mapping[str, Any], tensors: Iterable[str]) -> str:
    """The method that a checkpoint is for: as it says, or by what its tensors are called. Raises UnsupportedError where
    it says another."""
    algorithm = raw.get("speculators_model_type")
    if algorithm not in (None, "peagle", *METHODS):  # P-EAGLE's tensors are EAGLE-3's
        heads = ", ".join(name for name, method in METHODS.items() if method.signs)
        raise UnsupportedError(
            f"speculators_model_type={quoted(algorithm, 40)} is not read: take a checkpoint of {heads}"
        )
    said = algorithm or raw.get("model_type")
    if isinstance(said, str) and said in METHODS:
        return said
    own = raw.get("architectures")
    names = [*tensors, *(name for name in (own if isinstance(own, list) else []) if isinstance(name, str))]
    return next(signed(names, "head"), "draft_model")


def within(tensors: Iterable[str]) -> str | None:
    """The method whose head stands in a target's own checkpoint, None where there is none."""
    return next(signed(tensors, "target"), None)


def signed(tensors: Iterable[str], parameters: str) -> Iterator[str]:
    names = list(tensors)
    for name, method in METHODS.items():
        if method.parameters == parameters and any(fnmatch.filter(names, sign) for sign in method.signs):
            yield name


def implementation(method: str) -> Any:
    """The method's file."""
    return importlib.import_module(f"jaxspec.drafters.{method}")
