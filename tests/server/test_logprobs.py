"""Tokens of an answer as OpenAI's objects name them: texts that join to the answer's, offsets into it, bytes."""

from __future__ import annotations

import itertools

import pytest
from openai.types.chat import ChatCompletionTokenLogprob

from jaxspec.api.completions import PromptRun
from jaxspec.api.prompts import PromptRequest
from jaxspec.engine.request import Request, TokenLogprobs
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.server.logprobs import of_chat, of_prompt, of_text
from tests.support.vocabularies import ids_of, tokenizer_of

BYTES = ["byte-level", "byte fallback", "byte fallback, prefix"]


def prompt_run(kind: str, ids: list[int], others: list[int], prompt: list[int]) -> tuple[PromptRun, Request]:
    """A job whose output is not there yet, with log-probabilities for each of these ids: its own, then the others'."""
    params = SamplingParams(logprobs=len(others) + 1, prompt_logprobs=0)
    request = Request(0, prompt, params, 0, "greedy", (), 64, 0)
    ranked = lambda i: [i, *(o for o in others if o != i)]
    entry = lambda i: TokenLogprobs(-0.5, 1, ranked(i), [-0.5 - n for n in range(len(ranked(i)))])
    request.logprobs, request.prompt_logprobs = [entry(i) for i in ids], [entry(i) for i in prompt[1:]]
    return PromptRun(tokenizer_of(kind), PromptRequest(0, None, prompt, params), request), request


def ended(kind: str, ids: list[int], others: list[int] = [], prompt: list[int] = [0]):  # noqa: B006
    made, request = prompt_run(kind, ids, others, prompt)
    request.output, request.finish_reason = ids, "length"
    return made.output()


def entries(sample, most: int = 0) -> list[ChatCompletionTokenLogprob]:
    """Return a chat's entries, which are made when they are written."""
    return [ChatCompletionTokenLogprob.model_validate(entry) for entry in of_chat(sample, most).content]


@pytest.mark.parametrize("kind", BYTES)
def test_tokens_join_to_the_answer(kind):
    """With spaces, characters of several tokens, half a character at the end, and an end that the text leaves out."""
    euro = [b"\xe2", b"\x82", b"\xac"]
    ids = ids_of(kind, " true", " the", "dog", *euro, "E", "<|end|>", " dog", b"\xc3")
    (sample,) = ended(kind, ids).outputs
    assert sample.text == tokenizer_of(kind).decode(ids, skip_special_tokens=True)
    texts, end = of_text(sample.logprobs, ids, 0)
    assert end == len(sample.text)
    assert "".join(token for token in texts.tokens if token != "<|end|>") == sample.text
    for token, start in zip(texts.tokens, texts.text_offset, strict=True):
        assert token == "<|end|>" or sample.text[start : start + len(token)] == token
    content = entries(sample)
    assert [entry.token for entry in content] == texts.tokens
    assert [entry.token for entry in content if entry.bytes is None] == ["<|end|>"]
    joined = bytes(itertools.chain.from_iterable(entry.bytes or () for entry in content))
    assert joined == sample.text.replace("\ufffd", "").encode() + b"\xc3"


@pytest.mark.parametrize("kind", BYTES)
def test_a_space_tells_tokens_apart(kind):
    """As an answer's first token too, where some tokenizers leave the space out."""
    spaced, plain = ids_of(kind, " true", "true")
    (sample,) = ended(kind, [spaced, plain, spaced], [spaced, plain]).outputs
    first, second, third = of_text(sample.logprobs, sample.token_ids, 0)[0].top_logprobs
    assert third == {" true": -0.5, "true": -1.5}
    assert second == {"true": -0.5, " true": -1.5}
    assert first == ({"true": -0.5, f"token_id:{plain}": -1.5} if "prefix" in kind else third)
    listed = [[(e.token, bytes(e.bytes)) for e in entry.top_logprobs] for entry in entries(sample, 2)]
    assert listed[1:] == [[("true", b"true"), (" true", b" true")], [(" true", b" true"), ("true", b"true")]]


@pytest.mark.parametrize("kind", BYTES)
def test_no_alternative_is_lost(kind):
    """Parts of characters, and tokens of the same text, which are named by their bytes and their ids."""
    others = ids_of(kind, b"\xe2", b"\x82", b"\xc3", "E", "dog", "\ufffd")
    if kind != "byte-level":
        others += ids_of(kind, b"E")
    (sample,) = ended(kind, others[3:4] * 2, others).outputs
    (row, _), content = [*of_text(sample.logprobs, sample.token_ids, 0)[0].top_logprobs], entries(sample, 9)
    again = [f"token_id:{others[-1]}"] * (kind != "byte-level")
    assert list(row) == ["E", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xc3", "dog", "\ufffd", *again]
    assert [e.token for e in content[0].top_logprobs] == list(row)
    assert [bytes(e.bytes) for e in content[0].top_logprobs[:2]] == [b"E", b"\xe2"]


@pytest.mark.parametrize("kind", BYTES)
def test_a_stream_names_tokens_as_the_whole_answer_does(kind):
    ids = ids_of(kind, " true", b"\xe2", b"\x82", b"\xac", b"\xc3", "dog", "<s>", b"\xe2")
    (sample,) = ended(kind, ids, ids_of(kind, "true")).outputs
    made, request = prompt_run(kind, ids, ids_of(kind, "true"), [0])
    rows, text, offset, parts = [], "", 0, []
    for end in range(1, len(ids) + 1):
        request.output, request.finish_reason = ids[:end], "length" if end == len(ids) else None
        (piece,) = made.pieces()
        part, offset = of_text(piece.logprobs, piece.token_ids, offset)
        text, rows, parts = text + piece.text, rows + piece.logprobs, parts + part.text_offset
    assert (text, rows) == (sample.text, sample.logprobs)
    assert parts == of_text(sample.logprobs, ids, 0)[0].text_offset


@pytest.mark.parametrize("kind", BYTES)
def test_prompts_are_described_as_answers_are(kind):
    prompt = ids_of(kind, "<s>", " true", "true", b"\xc3", b"\xa9", " dog")
    described = of_prompt(ended(kind, [0], prompt=prompt), 0)["prompt_logprobs"]
    said = [row[str(i)]["decoded_token"] for i, row in zip(prompt[1:], [*described][1:], strict=True)]
    assert said[:2] == [" true", "true"]
    assert "".join(said) == " truetrueé dog"
