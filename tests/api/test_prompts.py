"""Prompts -> asks: bad words in their two forms."""

from __future__ import annotations

import pytest

from jaxspec.api.prompts import bad_word_ids, prompt_requests
from jaxspec.options.sampling_params import SamplingParams

# Text -> its ids, with no special tokens: words that a space in front makes another token, the same ones, or more.
IDS = {
    "dog": [3],
    " dog": [4],
    "cats": [5, 6],
    " cats": [7, 6],
    "x": [8],
    " x": [9, 8],
    "+": [10],
    " +": [10],
    "": [],
    " ": [11],
}


class Table:
    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + IDS[text]


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (("dog",), ((3,), (4,))),
        (("cats",), ((5, 6), (7, 6))),
        (("x",), ((8,),)),  # with a space it is longer
        (("+",), ((10,),)),  # with a space it begins alike
        ((" dog", "x"), ((3,), (4,), (8,))),
        ((), ()),
    ],
)
def test_bad_words_have_two_forms(words, ids):
    assert bad_word_ids(Table(), words) == ids


def test_a_bad_word_without_tokens():
    with pytest.raises(ValueError, match="bad_words: '  ' has no tokens: give words that have"):
        bad_word_ids(Table(), ("dog", "  "))


def test_asks_are_the_prompts_in_order_each_with_its_own():
    params = [SamplingParams(bad_words="dog"), SamplingParams(n=2), SamplingParams(bad_words="dog")]
    found = prompt_requests(Table(), ["dog", {"prompt": "x", "prompt_token_ids": (7, 8)}, [5]], params)
    assert [a.index for a in found] == [0, 1, 2]
    assert [a.text for a in found] == ["dog", "x", None]
    assert [a.ids for a in found] == [[1, 3], [7, 8], [5]]
    assert [a.params for a in found] == params
    assert [a.bad_words for a in found] == [((3,), (4,)), (), ((3,), (4,))]
