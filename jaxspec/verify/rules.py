"""The registry of acceptance rules. It is plain data, so that options can be checked against it without jax.

A rule is a line here and a file of this folder with the rule's name. Its `verify(case)` judges a `Case` of
`jaxspec.verify.base`, all rows as if they were under this rule. The file of a lossless rule also has
`output_distribution(p, q, tokens)`, which computes for tests the exact distribution of the outcome.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

from jaxspec.common.errors import UserError, quoted
from jaxspec.verify import synthetic_options, typical_options


def no_options(config: Any) -> dict[str, Any]:
    """Return the options of a rule that has none."""
    return {}


@dataclasses.dataclass(frozen=True)
class Rule:
    """An acceptance rule.

    noise: the noise that a row's drafts are drawn with. "round": keyed by the position where the round starts.
      "shared": keyed by the absolute position, and shared with the target's token. None: drafts are argmax tokens, and
      the rule reads only the argmax of the target's logits.
    needs_q: whether the rule reads the draft's distribution.
    lossless: whether the output has the target's distribution.
    all_rows: whether the rule also applies to requests of temperature 0, which are greedy under the other rules.
    options: options of SpeculativeConfig that belong to the rule; their values are `options` of the case.
    others: further options of SpeculativeConfig that belong to the rule and determine `options`.
    check: function that takes a SpeculativeConfig and returns the checked values of `options`, defaults filled in.
    """

    noise: Literal["round", "shared"] | None
    needs_q: bool = False
    lossless: bool = True
    all_rows: bool = False
    options: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    check: Callable[[Any], dict[str, Any]] = no_options


# The rules of greedy, unseeded and seeded requests under an engine that names no rule.
GREEDY, UNSEEDED, SEEDED = "greedy", "block", "coupled"
RULES = {
    GREEDY: Rule(None),
    "standard": Rule("round", needs_q=True),
    "block": Rule("round", needs_q=True),
    "coupled": Rule("shared"),
    "typical": Rule("round", lossless=False, options=tuple(typical_options.DEFAULTS), check=typical_options.checked),
    "synthetic": Rule(
        None,
        lossless=False,
        all_rows=True,
        options=synthetic_options.NAMES[:1],
        others=synthetic_options.NAMES[1:],
        check=synthetic_options.checked,
    ),
}
NAMES = tuple(name for name in RULES if name != GREEDY)  # values of rejection_sample_method


def checked(config: Any) -> dict[str, Any]:
    """Return the options of the rule that a SpeculativeConfig names. Raise UserError for an option of another rule."""
    asked = config.rejection_sample_method
    for name, rule in RULES.items():
        given = [option for option in (*rule.options, *rule.others) if getattr(config, option) is not None]
        if name != asked and given:
            raise UserError(f"{given[0]}={quoted(getattr(config, given[0]))} needs rejection_sample_method={name!r}")
    return RULES[asked].check(config) if asked else {}


def of_request(asked: str | None, *, greedy: bool, seeded: bool) -> str:
    """Return the name of a request's rule.

    asked: the rule that the engine's options name, if any.
    greedy: whether the request has temperature 0.
    seeded: whether the request has its own seed.
    """
    if greedy and not (asked and RULES[asked].all_rows):
        return GREEDY
    return asked or (SEEDED if seeded else UNSEEDED)


def number(name: str) -> int:
    """Return the number that represents a rule in `SamplingRows.rule`."""
    return list(RULES).index(name)


def ordered(names: Iterable[str]) -> list[str]:
    """Return rules in the order of RULES, so that the same rules always compile to the same program."""
    return sorted(names, key=number)


def implementation(name: str) -> Any:
    """Return the module of a rule."""
    return importlib.import_module(f"jaxspec.verify.{name}")
