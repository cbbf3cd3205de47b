"""Regular expressions of the numbers between two bounds, written without an exponent."""

from __future__ import annotations

import dataclasses
from decimal import Decimal

DIGITS = "[0-9]*"


@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound of a number. strict: whether the bound itself is left out."""

    value: Decimal
    strict: bool = False

    def negated(self) -> Bound:
        return Bound(self.value.copy_negate(), self.strict)  # a minus sign would round to 28 digits


ZERO = Bound(Decimal(0))


def either(options: list[str]) -> str | None:
    """Return the expression of one of these options, or None if there is none."""
    return f"(?:{'|'.join(options)})" if options else None


def numbers(low: Bound | None, high: Bound | None, *, whole: bool) -> str | None:
    """Return the expression of the numbers from low to high. None: there is no such bound, or no such number.

    whole: whether numbers are integers, without a fraction.
    """
    write = integers if whole else decimals
    options = []
    if high is None or high.value >= 0:
        options.append(write(low if low and low.value >= 0 else ZERO, high))
    if low is None or low.value < 0:
        least = high.negated() if high and high.value <= 0 else ZERO
        found = write(least, low.negated() if low else None)
        options.append(found and f"-{found}")
    return either([option for option in options if option])


def integers(low: Bound, high: Bound | None) -> str | None:
    """Return the expression of the integers from low to high, which are not negative."""
    first = int(low.value) + (low.strict or low.value != int(low.value))
    if high is None:
        return at_least(first)
    last = int(high.value) - (high.strict and high.value == int(high.value))
    return either(between(first, last))


def at_least(first: int) -> str:
    """Return the expression of the integers from `first` on, which is not negative."""
    size = len(str(first))
    return f"(?:{'|'.join([*between(first, 10**size - 1), f'[1-9][0-9]{{{size},}}'])})"


def between(first: int, last: int) -> list[str]:
    """Return expressions of the integers from `first` to `last`, which are not negative, one for each length."""
    found = []
    while first <= last:
        most = min(last, 10 ** len(str(first)) - 1)
        found.append(same_length(str(first), str(most)))
        first = most + 1
    return found


def same_length(first: str, last: str) -> str:
    """Return the expression of the numbers from `first` to `last`, which have as many digits."""
    if first == last:
        return first
    rest = len(first) - 1
    if first[1:] == "0" * rest and last[1:] == "9" * rest:
        return f"[{first[0]}-{last[0]}]" + (f"[0-9]{{{rest}}}" if rest else "")
    if first[0] == last[0]:
        return first[0] + same_length(first[1:], last[1:])
    low, high = int(first[0]), int(last[0])
    options = []
    if first[1:] != "0" * rest:
        options.append(first[0] + same_length(first[1:], "9" * rest))
        low += 1
    if last[1:] != "9" * rest:
        options.append(last[0] + same_length("0" * rest, last[1:]))
        high -= 1
    if low <= high:
        options.append(f"[{low}-{high}][0-9]{{{rest}}}")
    return f"(?:{'|'.join(options)})"


def decimals(low: Bound, high: Bound | None) -> str | None:
    """Return the expression of the numbers from low to high, which are not negative."""
    first, after_first = split(low)
    if high is None:
        options = [joined(str(first), fraction(after_first, low.strict, None, False))]
        options.append(f"{at_least(first + 1)}(?:\\.[0-9]+)?")
        return either([option for option in options if option])
    last, after_last = split(high)
    if first > last:
        return None
    if first == last:
        return joined(str(first), fraction(after_first, low.strict, after_last, high.strict))
    options = [joined(str(first), fraction(after_first, low.strict, None, False))]
    inner = either(between(first + 1, last - 1))
    options.append(inner and f"{inner}(?:\\.[0-9]+)?")
    options.append(joined(str(last), fraction("", False, after_last, high.strict)))
    return either([option for option in options if option])


def split(bound: Bound) -> tuple[int, str]:
    """Return the integer of a bound and the digits of its fraction, without zeros at the end."""
    whole, _, rest = f"{bound.value:f}".partition(".")
    return int(whole), rest.rstrip("0")


def joined(whole: str, rest: str | None) -> str | None:
    """Return an integer with the expression of its fraction; None if there is no such fraction."""
    return None if rest is None else whole + rest


def fraction(low: str, low_strict: bool, high: str | None, high_strict: bool) -> str | None:
    """Return the expression of a point and the digits after it, for numbers from 0.low to 0.high. high: None for 1.

    The whole fraction may be left out if 0 lies between the bounds.
    """
    found = digits(low, low_strict, high, high_strict, some=True)
    point = found and f"\\.{found}"
    if not zero_fits(low, low_strict, high, high_strict):
        return point
    return f"(?:{point})?" if point else ""


def zero_fits(low: str, low_strict: bool, high: str | None, high_strict: bool) -> bool:
    """Return whether 0 lies between 0.low and 0.high."""
    return not low and not low_strict and not (high == "" and high_strict)


def digits(low: str, low_strict: bool, high: str | None, high_strict: bool, *, some: bool = False) -> str | None:
    """Return the expression of the digits after a point, for numbers from 0.low to 0.high. high: None for 1.

    some: whether there has to be a digit. Return None if no number lies between the bounds.
    """
    more = "+" if some else "*"
    if not low and high is None:
        return "0*[1-9][0-9]*" if low_strict else f"[0-9]{more}"
    if not low and high == "":
        return None if low_strict or high_strict else f"0{more}"
    least, most = int(low[:1] or 0), 9 if high is None else int(high[:1] or 0)
    options = [] if some or not zero_fits(low, low_strict, high, high_strict) else [""]
    free = []
    for digit in range(least, most + 1):
        # A later digit has to keep a bound only where all digits so far are those of the bound.
        on_low, on_high = digit == least, high is not None and digit == most
        if not on_low and not on_high:
            free.append(digit)
            continue
        rest = digits(
            low[1:] if on_low else "",
            on_low and low_strict,
            high[1:] if on_high and high is not None else None,
            on_high and high_strict,
        )
        if rest is not None:
            options.append(f"{digit}{rest}")
    if free:
        options.append(f"[{free[0]}-{free[-1]}]{DIGITS}")
    return either(options)
