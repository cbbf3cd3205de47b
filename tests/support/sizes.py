"""The two sizes of the suite: `make test` leaves out what is marked `thorough`, `make test-all` runs everything."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def cases(names: str | tuple[str, ...], values: Iterable, *, quick: Sequence, **options: Any) -> pytest.MarkDecorator:
    """pytest.mark.parametrize; `make test` runs those of `quick` only, as the others show the same again."""
    values = list(values)
    assert quick, "to leave out all of them, mark the test"
    assert all(value in values for value in quick), f"{quick} are not all among {values}"
    arguments = lambda value: value if isinstance(names, tuple) else (value,)
    again = lambda value: pytest.param(*arguments(value), marks=pytest.mark.thorough)
    return pytest.mark.parametrize(names, [v if v in quick else again(v) for v in values], **options)


def of_today(values: Iterable) -> list:
    """One of these, another every day: each takes long, and shows little that the others do not."""
    values = list(values)
    return [values[datetime.date.today().toordinal() % len(values)]]
