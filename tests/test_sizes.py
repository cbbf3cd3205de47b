"""The cases that each size of the suite runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.sizes import cases, differs_twice


def test_cases_of_one_parameter():
    marked = cases("rows", [1, 2, 3], quick=[1], rest=[2]).mark.args[1]
    names = [{mark.name for mark in case.marks} for case in marked]
    assert names == [set(), {"thorough"}, {"thorough", "exhaustive"}]


def test_make_test_rest_changes_one_parameter_at_a_time():
    (only,) = cases("form", ["int8"], rest=["int8"]).mark.args[1]  # make test has none
    _, other = cases("rows", [1, 2], quick=[1]).mark.args[1]
    differs = lambda *values: differs_twice(SimpleNamespace(callspec=SimpleNamespace(marks=sum(values, ()))))
    assert differs(tuple(other.marks), tuple(other.marks))
    assert not differs(tuple(other.marks))
    assert not differs(tuple(other.marks), tuple(only.marks))
    assert not differs_twice(pytest.Item)  # of a test without parameters
