"""What goes in: prompts in four forms, chats, parameters, in any number."""

from __future__ import annotations

import numpy as np
import pytest

import jaxspec.api.llm
from jaxspec import LLM, SamplingParams
from jaxspec.common.errors import UserError
from tests.api.llm.answers import GREEDY, PROMPTS, ids_of, text_of
from tests.support.model_folders import BOS, write_model


def test_prompts_come_in_four_forms(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    forms = [PROMPTS[0], [PROMPTS[0]], ids, [ids], np.array(ids), {"prompt_token_ids": ids}, [{"prompt": PROMPTS[0]}]]
    results = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(r) == 1 and r[0].prompt_token_ids == ids for r in results)
    assert len({tuple(ids_of(r[0])) for r in results}) == 1
    assert results[0][0].prompt == PROMPTS[0]
    assert results[2][0].prompt is None


def test_no_prompts_no_outputs(llm):
    assert llm.generate([], GREEDY) == []


def test_outputs_come_in_the_order_of_the_prompts(llm):
    """More prompts than rows, and lengths that make them finish out of order."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (20, 3, 11, 1, 7)]
    outputs = llm.generate(PROMPTS, params)
    assert [o.prompt for o in outputs] == PROMPTS
    assert [len(ids_of(o)) for o in outputs] == [20, 3, 11, 1, 7]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        alone = llm.generate(prompt, GREEDY)[0]
        assert ids_of(output) == ids_of(alone)[: len(ids_of(output))]


def test_outputs_are_numbered(folder):
    """As in vLLM: "0", "1", ..., one a prompt, whatever n is. What is checked and refused has none."""
    llm = LLM(str(folder), max_num_seqs=2, num_pages=32)
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate([[]], GREEDY)
    outputs = llm.generate(PROMPTS[:2], SamplingParams(n=2, max_tokens=2))
    assert [(o.request_id, o.finished) for o in outputs] == [("0", True), ("1", True)]
    assert {piece.request_id for piece in llm.stream(PROMPTS[0], GREEDY)} == {"2"}
    outputs[0].outputs[1].finish_reason = None
    assert not outputs[0].finished


def test_text_is_the_decoded_output(llm):
    for output in llm.generate(PROMPTS, GREEDY):
        assert text_of(output) == llm.tokenizer.decode(ids_of(output), skip_special_tokens=True)


def test_chat_template_adds_no_second_bos(llm):
    message = [{"role": "user", "content": "hello"}]
    prompt = llm.render_chat(message)
    assert prompt["prompt_token_ids"].count(BOS) == 1
    assert prompt["prompt"] == "<s><user>hello<bot>"
    answers = llm.chat([message, message], GREEDY)
    assert [a.prompt_token_ids for a in answers] == [prompt["prompt_token_ids"]] * 2
    assert ids_of(llm.chat(message, GREEDY)[0]) == ids_of(answers[0])
    assert llm.tokenizer.encode("hello").count(BOS) == 1  # a plain prompt gets its one from the tokenizer


ASKED = {"role": "user", "content": "hello"}
BEGUN = {"role": "assistant", "content": "Well, "}


TURNS = "<s>{% for m in messages %}<user>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ({}, "<s><user>hello</s><user>Well, </s><bot>"),
        ({"add_generation_prompt": False}, "<s><user>hello</s><user>Well, </s>"),
        ({"continue_final_message": True}, "<s><user>hello</s><user>Well, "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<s><user>hello</s><user>Well, "),
    ],
)
def test_a_chat_opens_an_answer_or_continues_its_last_message(llm, monkeypatch, given, prompt):
    monkeypatch.setattr(llm.tokenizer, "chat_template", TURNS)
    assert llm.chat([ASKED, BEGUN], GREEDY, **given)[0].prompt == prompt


def test_a_chat_does_not_open_an_answer_and_continue_a_message(llm):
    with pytest.raises(UserError, match=r"add_generation_prompt=True opens a new message, .*: give one of them"):
        llm.chat([ASKED], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(UserError, match="continue_final_message=1 must be True or False"):
        llm.chat([ASKED], continue_final_message=1)


def test_tools_are_refused_where_the_template_shows_none(llm):
    with pytest.raises(UserError, match="calls of tools cannot be rendered: this model's chat template uses no tools"):
        llm.chat([ASKED, {"role": "assistant", "tool_calls": [{"type": "function"}]}])
    with pytest.raises(UserError, match="tools cannot be rendered: this model's chat template uses no tools"):
        llm.chat([ASKED], tools=[{"type": "function", "function": {"name": "f"}}])


def test_tools_are_rendered(llm, monkeypatch):
    """By the template for tools if there are several, also for the results of calls."""
    template = "<s>{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[-1].role }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in (template, {"default": "<s>", "tool_use": template}):
        monkeypatch.setattr(llm.tokenizer, "chat_template", given)
        assert llm.render_chat([ASKED], tools=tools)["prompt"] == "<s>fuser"
        assert llm.render_chat([ASKED, {"role": "tool", "content": "4"}])["prompt"] == "<s>tool"


def test_no_chat_template(tmp_path):
    llm = LLM(str(write_model(tmp_path / "m", chat=False)), num_pages=4)
    with pytest.raises(ValueError, match="no chat template: use generate"):
        llm.chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("messages", [["hello"], [ASKED, 3], [[]]])
def test_messages_that_no_template_takes(llm, messages):
    with pytest.raises(UserError, match="does not fit the model's chat template: "):
        llm.chat(messages)


@pytest.mark.parametrize("messages", ["hello", b"hello", {"role": "user", "content": "hello"}, None])
def test_what_is_no_conversation(llm, messages):
    with pytest.raises(UserError, match=r'is not a conversation: give a list of \{"role": '):
        llm.chat(messages)


def test_half_of_a_surrogate_pair_is_no_text(llm):
    with pytest.raises(UserError, match=r"prompt 1: 'a\\ud800' is not valid Unicode, because it holds half"):
        llm.generate(["a", "a\ud800"], GREEDY)
    with pytest.raises(UserError, match="is not valid Unicode"):
        llm.generate("a", SamplingParams(bad_words="\ud800"))
    with pytest.raises(UserError, match="is not valid Unicode"):
        llm.chat([{"role": "user", "content": "a\ud800"}])


@pytest.mark.parametrize(("given", "drawn"), [({}, True), ({"use_tqdm": False}, False), ({"use_tqdm": True}, True)])
def test_a_bar_is_asked_for_by_its_name_in_vllm(llm, monkeypatch, given, drawn):
    asked = []
    bar = jaxspec.api.llm.generation_progress
    monkeypatch.setattr(
        jaxspec.api.llm, "generation_progress", lambda *a, enabled: asked.append(enabled) or bar(*a, enabled=False)
    )
    llm.generate(PROMPTS[0], GREEDY, **given)
    llm.chat([{"role": "user", "content": "hello"}], GREEDY, **given)
    assert asked == [drawn] * 2
    llm.generate(PROMPTS[0], GREEDY, progress=False)
    assert asked[2:] == [False]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (print, "use_tqdm=.*print.*: give True or False, the bar is not drawn by tqdm"),
        (3, "use_tqdm=3 must be True or"),
    ],
)
def test_a_bar_is_not_drawn_by_tqdm(llm, given, message):
    with pytest.raises(UserError, match=message):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=given)


@pytest.mark.thorough
def test_bad_words_reach_the_engine_as_ids(llm, monkeypatch):
    checked, added, check, add = [], [], llm.engine.check, llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda *args, **how: added.append(how["bad_words"]) or add(*args, **how))
    llm.generate(PROMPTS[:2], [SamplingParams(bad_words=["dog"], max_tokens=2), GREEDY])
    monkeypatch.setattr(
        llm.engine, "check", lambda ids, params, words=(), ends=(): checked.append(words) or check(ids, params)
    )
    llm._prepare(PROMPTS[:2], [SamplingParams(bad_words=["dog"], max_tokens=2), GREEDY])
    assert checked == added
    assert checked[0][0] == tuple(llm.tokenizer.encode("dog", add_special_tokens=False))
    assert checked[1] == ()
    with pytest.raises(ValueError, match="prompt 1: bad_words: ' ' has no tokens"):
        llm.generate(PROMPTS[:2], [GREEDY, SamplingParams(bad_words=" ")])


@pytest.mark.thorough
def test_hundreds_of_prompts_come_back_in_order(llm):
    """Each with its own seed, so that no two answers are alike by chance."""
    prompts = [[5 + i % 300, 5 + i // 7] for i in range(400)]
    params = [SamplingParams(seed=i, max_tokens=1 + i % 3, ignore_eos=True) for i in range(400)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(ids_of(o)) for o in outputs] == [p.max_tokens for p in params]
    for i in (0, 57, 399):
        assert ids_of(outputs[i]) == ids_of(llm.generate([prompts[i]], params[i])[0])
