"""The table of acceptance rules. It is plain data, so that options can be checked against it without loading JAX.

A rule is an entry of RULES and a file of this folder with the rule's name. The file's function `verify(case)` decides
on a `Case` of `jaxspec.verify.base`, for all rows as if they used this rule. The file of a lossless rule also has
`output_distribution(p, q, tokens)`, which computes the exact distribution of the outcome for tests.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

from jaxspec.common.errors import UserError, quoted
from jaxspec.verify import synthetic_options, typical_options


def no_options(config: Any) -> dict[str, Any]:
    """Return an empty dict, for a rule without options."""
    return {}


@dataclasses.dataclass(frozen=True)
class Rule:
    """The properties of an acceptance rule.

    noise: kind of noise with which a row's drafts are drawn. "round": noise keyed by the position where the round
      starts. "shared": noise keyed by the absolute position, which the target's token uses too. None: drafts are argmax
      tokens, and the rule reads only the argmax of the target's logits.
    needs_q: whether the rule reads the draft's distribution q.
    lossless: whether the output has the target's distribution.
    all_rows: whether the rule also applies to requests with temperature 0. If not, those requests use the greedy rule.
    options: names of the SpeculativeConfig options whose values the rule reads in `Case.options`.
    others: names of further SpeculativeConfig options of the rule, from which the values of `options` are computed.
    check: function that takes a SpeculativeConfig and returns the checked values of `options`, defaults filled in.
    """

    noise: Literal["round", "shared"] | None
    needs_q: bool = False
    lossless: bool = True
    all_rows: bool = False
    options: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    check: Callable[[Any], dict[str, Any]] = no_options


# Names of the default rules for greedy, unseeded and seeded requests (see `of_request`).
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
NAMES = tuple(name for name in RULES if name != GREEDY)  # possible values of the option rejection_sample_method


def checked(config: Any) -> dict[str, Any]:
    """Return the checked options of the rule that a SpeculativeConfig names, by option name.

    Raises: UserError for an option of another rule, or for a value out of its range.
    """
    asked = config.rejection_sample_method
    for name, rule in RULES.items():
        given = [option for option in (*rule.options, *rule.others) if getattr(config, option) is not None]
        if name != asked and given:
            raise UserError(f"{given[0]}={quoted(getattr(config, given[0]))} needs rejection_sample_method={name!r}")
    return RULES[asked].check(config) if asked else {}


def of_request(asked: str | None, *, greedy: bool, seeded: bool) -> str:
    """Return the name of the acceptance rule for a request.

    asked: name of the rule that the engine's options name, or None.
    greedy: whether the request has temperature 0.
    seeded: whether the request has its own seed.
    """
    if greedy and not (asked and RULES[asked].all_rows):
        return GREEDY
    return asked or (SEEDED if seeded else UNSEEDED)


def number(name: str) -> int:
    """Return the number that represents an acceptance rule in `SamplingRows.rule`."""
    return list(RULES).index(name)


def ordered(names: Iterable[str]) -> list[str]:
    """Return rule names in the order of RULES, so that the same set of rules always gives the same program."""
    return sorted(names, key=number)


def implementation(name: str) -> Any:
    """Import and return the module that implements an acceptance rule."""
    return importlib.import_module(f"jaxspec.verify.{name}")
