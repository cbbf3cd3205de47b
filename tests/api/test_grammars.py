"""Forms of outputs begin after the reasoning in which a prompt ends."""

from __future__ import annotations

import dataclasses

import pytest

from jaxspec import SamplingParams
from jaxspec.api.grammars import Grammars
from jaxspec.api.prompts import PromptRequest
from jaxspec.grammars.automaton import START
from jaxspec.grammars.requests import StructuredOutputs
from tests.support.vocabularies import byte_level


class Reasoning:
    """A tokenizer of bytes with marks of reasoning."""

    def __init__(self, *marks: str) -> None:
        self.backend_tokenizer = byte_level()
        self.backend_tokenizer.add_tokens(list(marks))
        self.added = {mark: self.backend_tokenizer.token_to_id(mark) for mark in marks}

    def get_added_vocab(self) -> dict[str, int]:
        return self.added

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.backend_tokenizer.encode(text).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    ("prompt", "free"),
    [
        ("x", False),
        ("x<think>", True),
        ("<think>x</think>", False),
        ("<think>x</think><think> ", True),
        ("a user's <think> is a text", False),
        ("", False),
    ],
)
def test_a_prompt_may_end_inside_of_reasoning(prompt, free):
    tokenizer = Reasoning("<think>", "</think>")
    params = SamplingParams(structured_outputs={"choice": ["E"]})
    known = Grammars(tokenizer, [0], 300, None)
    ids = tokenizer.encode(prompt)
    found = known.build(PromptRequest(0, prompt, ids, params)).result()
    (other,) = tokenizer.encode("dog")[:1]
    assert found.legal(START)[other] == free
    explicit = dataclasses.replace(params, structured_outputs={"choice": ["E"], "after": "</think>"})
    assert known.build(PromptRequest(0, "x", [1], explicit)).result().legal(START)[other]
    assert known.build(PromptRequest(0, prompt, ids, SamplingParams())) is None


def test_a_prompt_decides_whether_reasoning_may_come():
    """A form that reasoning may come before: at the start, after a prompt that opens reasoning, or that closes it."""
    tokenizer = Reasoning("<think>", "</think>")
    known = Grammars(tokenizer, [0], 300, None)
    form = StructuredOutputs("choice", '["E"]', after="</think>", opening="<think>")
    (opening,), (other,) = tokenizer.encode("<think>"), tokenizer.encode("dog")[:1]
    for prompt, expected in (("x", (True, False)), ("x<think>", (True, True)), ("<think></think>\n", (False, False))):
        asked = PromptRequest(0, prompt, tokenizer.encode(prompt), SamplingParams(structured_outputs=form))
        legal = known.build(asked).result().legal(START)
        assert (legal[opening], legal[other]) == expected, prompt


def test_a_tokenizer_without_both_marks_has_no_reasoning():
    tokenizer = Reasoning("<think>")
    params = SamplingParams(structured_outputs={"choice": ["E"]})
    found = (
        Grammars(tokenizer, [0], 300, None).build(PromptRequest(0, "", tokenizer.encode("<think>"), params)).result()
    )
    assert found.legal_counts()[START] < 3
