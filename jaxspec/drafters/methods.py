"""The registry of drafting methods: plain data, so that options can be checked against the methods without jax.

A method is an entry of METHODS, and a module of this folder with the method's name. The module's function
`drafter(k, most, models, speculative)` returns the drafter that proposes k tokens a round, for an engine whose rounds
propose at most `most` tokens. For draft trees, k and most are both the depth of the trees. models: the models by role,
"target" and "draft". speculative: the speculation options.
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

    The module of a method with a head (a small network on the target's hidden states) also has `read(found)`. That
    function returns the `Reading` of the head's checkpoint: the head's configuration and the names of its tensors. See
    `jaxspec.drafters.head_checkpoint`.

    parameters: kind of checkpoint that holds the method's parameters: a draft "model", a "head" for a target, or the
      "target" itself; None for a method without parameters.
    signs: shell patterns of tensor names or architecture names that identify the method's checkpoints.
    """

    parameters: Literal["model", "head", "target"] | None
    signs: tuple[str, ...] = ()


METHODS = {
    "draft_model": Method("model"),
    "ngram": Method(None),
    "suffix": Method(None),
    # The order of the methods with heads matters: the first method with a matching sign is taken.
    "dspark": Method("head", ("markov_head.*", "confidence_head.*", "*DSpark*")),
    "dflash": Method("head", ("hidden_norm.weight", "encoder.output_norm_enc.weight")),
    "eagle3": Method("head", ("d2t", "*midlayer.*", "*layers.0.hidden_norm.weight")),
    "eagle": Method("head", ("fc.weight", "model.fc.weight")),
    "medusa": Method("head", ("0.0.linear.weight", "medusa_head.*", "medusa_heads.*", "blocks.0.layers.*")),
    "mlp_speculator": Method("head", ("speculator.*",)),
    "gemma4_assistant": Method("head", ("pre_projection.weight", "*Gemma4Assistant*")),
    "mtp": Method("target", ("*.eh_proj.weight", "model.mtp_layers.*", "mtp.fc.weight")),
}
LOOKUP = "ngram+"  # prefix of a method's name, for prompt lookup followed by that method
NAMES = (*METHODS, *(LOOKUP + name for name, method in METHODS.items() if method.parameters))


def split(name: str) -> tuple[bool, str]:
    """Split a method's name into whether prompt lookup comes first, and the method without lookup.

    Example: "ngram+draft_model" gives (True, "draft_model").
    """
    return name.startswith(LOOKUP), name.removeprefix(LOOKUP)


def of_checkpoint(raw: Mapping[str, Any], tensors: Iterable[str]) -> str:
    """Return the drafting method of a checkpoint.

    This is the method that config.json names, else the first method with a head of which the checkpoint has a sign
    (`Method.signs`), else "draft_model".

    raw: content of config.json.
    tensors: names of the checkpoint's tensors.

    Raises:
      UnsupportedError: speculators_model_type in config.json names a method that is not known.
    """
    algorithm = raw.get("speculators_model_type")
    if algorithm not in (None, "peagle", *METHODS):  # P-EAGLE is recognised by EAGLE-3's tensors
        heads = ", ".join(name for name, method in METHODS.items() if method.signs)
        raise UnsupportedError(
            f"speculators_model_type={quoted(algorithm, 40)} is not supported: use a checkpoint of {heads}"
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
    """Return the drafting method whose head is in a target's own checkpoint; None if there is no such head.

    tensors: names of the checkpoint's tensors.
    """
    return next(by_signature(tensors, "target"), None)


def by_signature(tensors: Iterable[str], parameters: str) -> Iterator[str]:
    """Yield the methods of which a sign (`Method.signs`) matches one of the names in `tensors`.

    tensors: names of tensors, and perhaps of architectures.
    parameters: kind of checkpoint; methods with another kind are left out.
    """
    names = list(tensors)
    for name, method in METHODS.items():
        if method.parameters == parameters and any(fnmatch.filter(names, sign) for sign in method.signs):
            yield name


def implementation(method: str) -> Any:
    """Import and return the module that implements a method."""
    return importlib.import_module(f"jaxspec.drafters.{method}")
