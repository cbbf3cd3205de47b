"""structured_outputs of LLM: each ended text has the form, whatever shares the batch and however it is sampled."""

from __future__ import annotations

import enum
import json
import re
from typing import Any

import jsonschema
import pydantic
import pytest

from jaxspec import SamplingParams
from jaxspec.common.errors import UserError
from tests.api.llm.answers import GREEDY, PROMPTS, ids_of, text_of
from tests.support.sizes import cases

COLOURS = ["red", "green", "blue"]


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Item(pydantic.BaseModel):
    colour: Colour
    count: int = pydantic.Field(ge=1, le=20)
    note: str | None = pydantic.Field(default=None, max_length=4)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": -5, "maximum": 5},
        "tags": {"type": "array", "items": {"enum": COLOURS}, "minItems": 1, "maxItems": 3},
        "when": {"type": "string", "format": "date"},
        "name": {"type": "string", "minLength": 2, "maxLength": 5},
    },
    "required": ["id", "tags"],
}
REGEX = r"(?:ab|a)[0-9]{2,4}(?: é)?"
SAMPLING: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 2.0}]


def fits(form: dict[str, Any], text: str) -> bool:
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    if "choice" in form:
        return text in form["choice"]
    return jsonschema.Draft202012Validator(form["json"]).is_valid(json.loads(text))


FORMS: list[dict[str, Any]] = [
    {"regex": REGEX},
    {"choice": COLOURS},
    {"json": SCHEMA},
    {"json": Item.model_json_schema()},
]


@cases("sampling", SAMPLING, quick=SAMPLING[:2], ids=["greedy", "seeded", "hot"])
def test_every_ended_text_has_its_form(llm, sampling):
    """Beside a request without a form, whose text stays what it is alone."""
    params = [SamplingParams(max_tokens=200, n=3, structured_outputs=form, **sampling) for form in FORMS]
    *outputs, free = llm.generate(PROMPTS, [*params, GREEDY])
    for form, output in zip(FORMS, outputs, strict=True):
        for completion in output.outputs:
            assert completion.finish_reason == "stop", completion
            assert fits(form, completion.text), completion.text
    assert text_of(free) == text_of(llm.generate(PROMPTS[-1], GREEDY)[0])


def test_a_pydantic_model_is_given_as_the_schema(llm):
    params = SamplingParams(max_tokens=200, temperature=1.0)
    for output in llm.generate(PROMPTS[:2], params, schema=Item):
        assert 1 <= Item.model_validate_json(text_of(output)).count <= 20
    (said,) = llm.chat([{"role": "user", "content": "x"}], params, schema=Item.model_json_schema())
    assert Item.model_validate_json(text_of(said))
    each = [SamplingParams(max_tokens=200, seed=1), SamplingParams(max_tokens=200, seed=2)]
    assert all(Item.model_validate_json(text_of(output)) for output in llm.generate(PROMPTS[:2], each, schema=Item))


def test_a_schema_beside_a_form_is_refused(llm):
    with pytest.raises(UserError, match="have structured_outputs of their own: leave schema out"):
        llm.generate("x", SamplingParams(structured_outputs={"choice": ["a"]}), schema=Item)
    with pytest.raises(UserError, match="the schema at # has 'not'"):
        llm.generate("x", schema={"not": {}})
    with pytest.raises(UserError, match="sampling_params=3"):
        llm.generate("x", 3, schema=Item)


def test_a_stream_has_the_form_too(llm):
    params = SamplingParams(max_tokens=200, temperature=1.0, structured_outputs={"json": SCHEMA})
    pieces = list(llm.stream(PROMPTS[0], params))
    assert pieces[-1].finish_reason == "stop"
    assert fits({"json": SCHEMA}, "".join(piece.text for piece in pieces))


def test_a_text_that_max_tokens_cuts_says_length(llm):
    form = {"regex": "(?:ab){50}"}
    (output,) = llm.generate("x", SamplingParams(max_tokens=5, structured_outputs=form))
    assert output.outputs[0].finish_reason == "length"
    assert re.fullmatch("(?:ab)*a?", text_of(output))


def test_ignore_eos_does_not_outlast_the_form(llm):
    params = SamplingParams(max_tokens=50, ignore_eos=True, structured_outputs={"choice": ["red"]})
    (output,) = llm.generate("x", params)
    assert (text_of(output), output.outputs[0].finish_reason) == ("red", "stop")


def test_a_stop_string_may_cut_the_form(llm):
    params = SamplingParams(max_tokens=50, stop="e", structured_outputs={"choice": ["red"]})
    (output,) = llm.generate("x", params)
    assert (text_of(output), output.outputs[0].finish_reason) == ("r", "stop")


@pytest.mark.parametrize("more", [{"min_tokens": 40}, {"allowed_token_ids": [5]}])
def test_parameters_that_leave_no_token_end_the_request_in_a_line(llm, more):
    params = SamplingParams(max_tokens=50, structured_outputs={"choice": ["red"]}, **more)
    with pytest.warns(RuntimeWarning, match="1 of 2 completions ended with an error"):
        wrong, other = llm.generate(["x", PROMPTS[0]], [params, GREEDY])
    assert wrong.outputs[0].finish_reason == "error"
    assert f"no token id was allowed: structured_outputs and {next(iter(more))}" in wrong.outputs[0].error
    assert ids_of(other) == ids_of(llm.generate(PROMPTS[0], GREEDY)[0])


def test_parameters_beside_a_form_hold(llm):
    params = SamplingParams(
        **{"max_tokens": 50, "bad_words": ["dog"], "logit_bias": {5: 3.0}, "presence_penalty": 1.0, "logprobs": 2},
        structured_outputs={"choice": COLOURS},
        n=4,
    )
    (output,) = llm.generate("x", params)
    assert {completion.text for completion in output.outputs} <= {*COLOURS}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": ".*a.{20}"}, "prompt 1: structured_outputs: the grammar has more than 16384 states"),
        ({"regex": "[^\x00-\U0010ffff]"}, "prompt 1: structured_outputs: no text of the tokenizer's tokens fits"),
        (
            {"choice": ["a"], "after": "</think>"},
            "prompt 1: structured_outputs: after='</think>' is not a token",
        ),
    ],
)
def test_a_form_that_cannot_be_built_is_refused_before_anything_is_queued(llm, form, message):
    wrong = SamplingParams(structured_outputs=form)
    for call in (llm.generate, llm.stream):
        with pytest.raises(UserError) as error:
            call(["x", "y"], [GREEDY, wrong])
        assert str(error.value).startswith(message)


def test_a_form_begins_after_a_mark(llm):
    """<bot> stands for the end of the reasoning; special tokens are left out of the text."""
    params = SamplingParams(
        max_tokens=60,
        temperature=0.0,
        logit_bias={llm.tokenizer.convert_tokens_to_ids("<bot>"): 5.0},
        structured_outputs={"choice": COLOURS, "after": "<bot>"},
        skip_special_tokens=False,
    )
    (output,) = llm.generate("x", params)
    assert output.outputs[0].finish_reason == "stop"
    assert text_of(output).partition("<bot>")[2] in COLOURS
