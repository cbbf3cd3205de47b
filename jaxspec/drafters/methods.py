"""The registry of drafting methods. It is plain data, so that options can be checked against it without jax.

A method is a line here and a file of this folder with the method's name. Its `drafter(k, most, models, speculative)`
returns the drafter of k tokens a round, for an engine whose rounds propose at most `most`.
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
    """A method of drafting.

    The file of a method with a head also has `read(found)`, which returns the `Reading` of the head's checkpoint: its
    configuration and its tensors' names. See `jaxspec.drafters.head_checkpoint`.

    parameters: kind of checkpoint that holds the method's parameters: a draft "model", a "head" for a target, or the
      "target" itself; None for a method without parameters.
    signs: shell patterns of tensor names or architectures that only the method's checkpoints have.
    """

    parameters: Literal["model", "head", "target"] | None
    signs: tuple[str, ...] = ()


METHODS = {
    "draft_model": Method("model"),
    "ngram": Method(None),
    "suffix": Method(None),
    # Order matters for heads: the first method with a matching sign is taken.
    "dspark": Method("head", ("markov_head.*", "confidence_head.*", "*DSpark*")),
    "dflash": Method("head", ("hidden_norm.weight",)),
    "eagle3": Method("head", ("d2t", "*midlayer.*", "*layers.0.hidden_norm.weight")),
    "eagle": Method("head", ("fc.weight", "model.fc.weight")),
    "medusa": Method("head", ("0.0.linear.weight", "medusa_head.*", "medusa_heads.*", "blocks.0.layers.*")),
    "mlp_speculator": Method("head", ("speculator.*",)),
    "mtp": Method("target", ("*.eh_proj.weight", "model.mtp_layers.*", "mtp.fc.weight")),
}
LOOKUP = "ngram+"  # prefix of a method's name: prompt lookup first, then that method
NAMES = (*METHODS, *(LOOKUP + name for name, method in METHODS.items() if method.parameters))


def split(name: str) -> tuple[bool, str]:
    """Return whether prompt lookup comes first, and the method: (True, "draft_model") for "ngram+draft_model"."""
    return name.startswith(LOOKUP), name.removeprefix(LOOKUP)


def of_checkpoint(raw: Mapping[str, Any], tensors: Iterable[str]) -> str:
    """Return the method of a checkpoint: the one that its config.json names, else the one whose signs it has.

    Raises:
      UnsupportedError: config.json names a method that is not known.
    """
    algorithm = raw.get("speculators_model_type")
    if algorithm not in (None, "peagle", *METHODS):  # P-EAGLE's tensors are EAGLE-3's
        heads = ", ".join(name for name, method in METHODS.items() if method.signs)
        raise UnsupportedError(
            f"speculators_model_type={quoted(algorithm, 40)} is not read: take a checkpoint of {heads}"
        )
    named = algorithm or raw.get("model_type")
    if isinstance(named, str) and named in METHODS:
        return named
    names = list(tensors)
    architectures = raw.get("architectures")
    if isinstance(architectures, list):
        names += [name for name in architectures if isinstance(name, str)]
    return next(by_signature(names, "head"), "draft_model")


def within(tensors: Iterable[str]) -> str | None:
    """Return the method whose head is in a target's own checkpoint; None if there is no such head."""
    return next(by_signature(tensors, "target"), None)


def by_signature(tensors: Iterable[str], parameters: str) -> Iterator[str]:
    """Yield the methods with this kind of parameters whose signs are among the names."""
    names = list(tensors)
    for name, method in METHODS.items():
        if method.parameters == parameters and any(fnmatch.filter(names, sign) for sign in method.signs):
            yield name


def implementation(method: str) -> Any:
    """Return the module of a method."""
    return importlib.import_module(f"jaxspec.drafters.{method}")
