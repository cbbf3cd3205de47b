"""The acceptance rules by name: the one place that lists them. Plain data, so that options can be checked against it.

A rule is a line here and a file of this folder by its name. `verify(case)` there judges the proposals of a round, a
`Case` of `jaxspec.verify.base`, all rows as if they were under this rule; and `law(p, q, tokens)` of a lossless one
tells, for tests, how that comes out.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

from jaxspec.common.errors import UserError, quoted
from jaxspec.verify import synthetic_options, typical_options


@dataclasses.dataclass(frozen=True)
class Rule:
    """noise: what a row's drafts are drawn with: numbers of the round's own, or those that its seed has at each
    absolute position, which then make the target's token too. None: nothing is drawn, the likeliest is proposed, and
    of the target's logits only which is the largest is looked at.

    needs_q: it looks at what probability a draft had.
    lossless: the output has the target's law.
    all_rows: requests of temperature 0 are under it, too; under the other rules they are greedy.
    options: those of SpeculativeConfig that belong to it, of which `verify` has the numbers in the case's `options`;
      others: those that belong to it, too, and set these.
    check: SpeculativeConfig -> the values of `options`, checked, defaults filled in.
    """

    noise: Literal["round", "shared"] | None
    needs_q: bool = False
    lossless: bool = True
    all_rows: bool = False
    options: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    check: Callable[[Any], dict[str, Any]] = lambda config: {}


GREEDY, UNSEEDED, SEEDED = "greedy", "block", "coupled"  # where no rule is asked for
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
NAMES = tuple(name for name in RULES if name != GREEDY)  # that may be asked for


def checked(config: Any) -> dict[str, Any]:
    """Return the options of the rule that a SpeculativeConfig asks for. Raise UserError for another rule's."""
    asked = config.rejection_sample_method
    for name, rule in RULES.items():
        given = [option for option in (*rule.options, *rule.others) if getattr(config, option) is not None]
        if name != asked and given:
            raise UserError(f"{given[0]}={quoted(getattr(config, given[0]))} needs rejection_sample_method={name!r}")
    return RULES[asked].check(config) if asked else {}


def of_request(asked: str | None, *, greedy: bool, seeded: bool) -> str:
    """The rule of a request. asked: by name, for the whole engine; greedy: it has temperature 0; seeded: it has a seed
    of its own."""
    if greedy and not (asked and RULES[asked].all_rows):
        return GREEDY
    return asked or (SEEDED if seeded else UNSEEDED)


def number(name: str) -> int:
    """By which a row on the device says what rule it is under."""
    return list(RULES).index(name)


def ordered(names: Iterable[str]) -> list[str]:
    """In the order of RULES, as a program has to be the same each time."""
    return sorted(names, key=number)


def implementation(name: str) -> Any:
    """The rule's file."""
    return importlib.import_module(f"jaxspec.verify.{name}")
