"""Regular expressions give the texts that re gives, in the smallest automaton; the rest is refused by name."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from jaxspec.common.errors import UserError
from jaxspec.grammars import machine
from jaxspec.grammars.json_text import PLAIN, unlike
from jaxspec.grammars.nodes import EMPTY, NOTHING, chars, choice, complement, concat, listing, literal, merged, repeat
from jaxspec.grammars.regex import parsed, searched, whole
from tests.grammars.walks import Language

ATOMS = strategies.sampled_from(["a", "b", "é", "[ab]", "[^a]", ".", r"\d", r"\w", "", "😀", "[0-c]"])


def joined(inner):
    return (
        strategies.lists(inner, min_size=1, max_size=3).map("".join)
        | strategies.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})")
        | strategies.tuples(inner, strategies.sampled_from("*+?")).map(lambda two: f"(?:{two[0]}){two[1]}")
        | strategies.tuples(inner, strategies.sampled_from(["{2}", "{0,2}", "{1,}", "*?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        )
    )


REGEX = strategies.recursive(ATOMS, joined, max_leaves=8)
TEXT = strategies.text("abc1é😀", max_size=5)


@settings(max_examples=150)
@given(REGEX, strategies.lists(TEXT, min_size=1, max_size=12))
def test_an_automaton_has_the_texts_of_its_expression(regex, texts):
    language = Language(whole(regex))
    for text in texts:
        assert (text in language) == bool(re.fullmatch(regex, text, re.ASCII)), (regex, text)


@settings(max_examples=100)
@given(REGEX, strategies.sampled_from(["", "^"]), strategies.sampled_from(["", "$"]), TEXT)
def test_a_search_finds_it_anywhere_between_its_anchors(regex, begin, end, text):
    language = Language(searched(f"{begin}(?:{regex}){end}", lambda ranges: chars(*ranges)))
    assert (text in language) == bool(re.search(f"{begin}(?:{regex}){end}", text, re.ASCII))


@pytest.mark.parametrize(
    ("regex", "inside", "outside"),
    [
        ("^a|b$", ["a", "ax", "b", "xb"], ["xa", "bx"]),
        ("(^a$|^b$)", ["a", "b"], ["ab", ""]),
        ("^(ab|ac)$", ["ab", "ac"], ["a", "abc"]),
        ("a$|^b", ["xa", "by"], ["ay", "xb"]),
        ("^a$|^ab$", ["a", "ab"], ["", "b", "xa", "abx"]),
        ("^foo$|^foobar$|^fob", ["foo", "foobar", "fobx"], ["foob", "foobarx", "fo"]),
        ("^a(?:b$|c)", ["ab", "ac", "acx"], ["abx", "xab"]),
        ("a(b(c$|d$)|e)", ["xabc", "abd", "aex"], ["abcx", "ab"]),
    ],
)
def test_each_alternative_has_its_own_anchors(regex, inside, outside):
    language = Language(searched(regex, lambda ranges: chars(*ranges)))
    assert [text for text in inside if text not in language] == []
    assert [text for text in outside if text in language] == []


def test_the_longer_of_two_alternatives_is_legal():
    """Engines that prefer the first alternative leave out the second of these."""
    language = Language(whole("a|ab"))
    assert "a" in language
    assert "ab" in language


@pytest.mark.parametrize(
    ("regex", "message"),
    [
        ("(?=a)b", "has a lookaround, which is not supported: write what may stand there"),
        ("(?!a)b", "has a lookaround"),
        ("(?<=a)b", "has a lookaround"),
        ("(?<!a)b", "has a lookaround"),
        ("a(?!)", "has a lookaround"),
        (r"(a)\1", "has a backreference"),
        ("(?P<x>a)(?P=x)", "has a backreference"),
        ("(a)?(?(1)b|c)", "has a conditional group"),
        (r"a\bc", "has an anchor, which is not supported: only ^ at the beginning and $ at the end are taken"),
        (r"\B", "has an anchor"),
        ("a^b", "has an anchor"),
        ("a(b$)c", "has an anchor"),
        ("a(^b$|c)", "has an anchor"),
        ("(?i)a", "sets flags"),
        ("(?i:a)", "sets flags"),
        ("(?>a)", "has an atomic group"),
        ("a++", "has a possessive quantifier"),
        ("(", "is wrong: error: missing )"),
        ("[", "is wrong"),
        ("*a", "is wrong"),
        (r"\p{L}", "is wrong: error: bad escape"),
        ("(" * 5000, "is nested too deeply: flatten it"),
        ("a{2,1}", "is wrong"),
    ],
)
def test_what_is_not_kept_is_refused_by_name(regex, message):
    with pytest.raises(UserError) as error:
        whole(regex)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (whole(".*a.{20}"), "more than 500 states"),
        (whole("(?:a{1000}){1000}"), "more than 5000 parts"),
        (whole("(?:a?){1000}"), "more than 100000 steps"),
    ],
)
def test_a_large_automaton_is_refused_while_it_grows(monkeypatch, node, message):
    for limit, most in {"MAX_STATES": 500, "MAX_PARTS": 5000, "MAX_WORK": 100_000}.items():
        assert getattr(machine, limit) > most
        monkeypatch.setattr(machine, limit, most)
    with pytest.raises(UserError, match=message):
        machine.compiled(node)


@given(REGEX)
def test_no_two_states_of_an_automaton_are_alike(regex):
    """Texts tell them apart: the smallest automaton is the same size as that of the doubled expression."""
    table, accepting = machine.compiled(whole(regex))
    again, _ = machine.compiled(whole(f"(?:{regex})|(?:{regex})"))
    assert table.shape == again.shape
    distinct = {(tuple(row), bool(flag)) for row, flag in zip(table.tolist(), accepting, strict=True)}
    assert len(distinct) == len(table)


def test_a_chain_is_made_smallest_in_one_pass(monkeypatch):
    """Each of 4,000 passes over all its states would sort them."""
    sorts = []
    unique = np.unique
    monkeypatch.setattr(np, "unique", lambda *args, **more: sorts.append(1) or unique(*args, **more))
    for regex, states in [("[a-z]{4000}", 4001), ("(?:[a-z]{0,999},)*", 1000), ("(?:ab|cb){1000}d*", 2001)]:
        table, _ = machine.compiled(whole(regex))
        assert len(table) == states
    assert len(sorts) < 20


POINTS = strategies.integers(0, 0x10FFFF) | strategies.sampled_from([0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF])


@given(strategies.lists(strategies.tuples(POINTS, POINTS).map(sorted).map(tuple), min_size=1, max_size=3), POINTS)
def test_ranges_of_characters_are_kept_in_utf8(ranges, point):
    found = merged(ranges)
    points = [p for a, b in ranges for p in (a - 1, a, b, b + 1)]
    language = Language(chars(*ranges))
    for p in [point, *points]:
        if 0 <= p <= 0x10FFFF and not 0xD800 <= p <= 0xDFFF:
            assert (chr(p) in language) == any(a <= p <= b for a, b in ranges)
    assert complement(complement(found)) == found


def test_a_listing_keeps_order_and_what_has_to_be_there():
    members = [(literal("a"), False), (literal("b"), True), (literal("c"), False)]
    language = Language(listing(members, literal("x"), literal(",")))
    inside = ["b", "a,b", "b,c", "a,b,c", "b,x", "a,b,c,x,x", "b,c,x"]
    outside = ["", "a", "a,c", "c", "b,a", "x", "b,", ",b", "b,x,c", "a,b,b"]
    assert [text for text in inside if text not in language] == []
    assert [text for text in outside if text in language] == []


def test_a_node_reads_those_below_once():
    """Each level would read 2 ** 60 nodes."""
    node = literal("a")
    for _ in range(60):
        node = choice(concat(node, node), node)
    assert choice(node, node) is node
    assert hash(node) == hash(choice(*node.options))


def test_what_has_no_text_drops_out():
    a = literal("a")
    assert concat(a, NOTHING) == NOTHING
    assert choice(a, NOTHING) == a
    assert repeat(NOTHING, 1) == NOTHING
    assert "" in Language(repeat(NOTHING, 0))
    assert repeat(a, 2, 1) == NOTHING
    assert listing([(NOTHING, True)], a, a) == NOTHING


@given(strategies.lists(strategies.text("ab", max_size=3), max_size=5), strategies.text("abc", max_size=4))
def test_unlike_leaves_out_exactly_these(names, text):
    assert (text in Language(unlike(names))) == (text not in names)


def test_a_warning_that_is_an_error_is_a_refusal():
    """Python warns of [[, which another version may read as a set."""
    with pytest.raises(UserError, match="is wrong"):
        parsed("[[a]")


def test_a_string_of_bytes_is_no_character():
    table, _ = machine.compiled(chars(*PLAIN))
    assert np.all(table[0, 0x80:0xC2] == machine.DEAD)
    assert np.all(table[0, 0xF5:] == machine.DEAD)


def test_white_space_and_digits_are_those_of_ecma_262():
    """Python's are others."""
    space, digit = Language(whole(r"\s")), Language(whole(r"\d"))
    assert [c for c in " \t\n\v\f\r\xa0\u2003\u2028\ufeff" if c not in space] == []
    assert [c for c in "a\x1c\x85" if c in space] == []
    assert [c for c in "\u0661\xb2" if c in digit] == []
    assert "\ufeff" not in Language(whole(r"\S"))


@pytest.mark.parametrize("regex", ["(?:){4000000000}", "(?:){0,4000000000}a", "(?:(?:){99999999}){99999999}"])
def test_a_repeated_empty_text_is_one(regex):
    """No limit counts its repetitions, because they add no state."""
    assert whole(regex) in (EMPTY, literal("a"))
