"""The sizes of the suite. `make test` leaves out what is marked `thorough`, `make test-rest` runs that but for what is
marked `exhaustive`, `make test-all` runs everything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def differs_twice(item: pytest.Item) -> bool:
    """Return whether at least two parameters of a test have values that `make test` leaves out.

    `make test-rest` runs each such value once, with all other parameters at values that `make test` runs.
    """
    callspec = getattr(item, "callspec", None)
    marks = callspec.marks if callspec else ()
    return sum(mark.name == "thorough" and mark.kwargs.get("beside", False) for mark in marks) > 1


def cases(
    names: str | tuple[str, ...],
    values: Iterable,
    *,
    quick: Sequence = (),
    rest: Sequence | None = None,
    **options: Any,
) -> pytest.MarkDecorator:
    """Parametrize a test with cases that show the same.

    quick: the values that `make test` runs.
    rest: those that `make test-rest` runs besides; by default the last of the others. What is in neither,
      only `make test-all` runs. So are cases in which two parameters have other values than in `make test`.
    """
    values = list(values)
    assert quick or rest is not None, "to leave out all of them, mark the test"
    if rest is None:
        others = [value for value in values if value not in quick]
        rest = others[-1:]
    assert all(value in values for value in (*quick, *rest)), f"{quick} and {rest} are not all among {values}"

    def case(value: Any) -> Any:
        marks = [] if value in quick else [pytest.mark.thorough(beside=bool(quick))]
        if value not in quick and value not in rest:
            marks.append(pytest.mark.exhaustive)
        return pytest.param(*(value if isinstance(names, tuple) else (value,)), marks=marks)

    return pytest.mark.parametrize(names, [case(value) for value in values], **options)
