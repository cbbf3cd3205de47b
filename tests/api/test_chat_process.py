"""Chat templates in a process of its own: the text is the tokenizer's, and what never ends is ended."""

from __future__ import annotations

import os
import signal

import pytest

import checkpoints
from jaxspec.api.chat import rendering
from jaxspec.api.chat_process import TemplateProcess
from jaxspec.common.errors import UserError

TALK = [{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "The Elbe"}]
FOR_EVER = "{% for i in range(100000) %}" * 3 + "{% endfor %}" * 3


@pytest.fixture(scope="module")
def tokenizer():
    return checkpoints.load_tokenizer(checkpoints.resolve("smollm2-135m-instruct", weights=False))


@pytest.fixture(scope="module")
def process():
    found = TemplateProcess(seconds=0.7)
    yield found
    found.close()


@pytest.mark.parametrize("how", [{}, {"add_generation_prompt": False}, {"continue_final_message": True}])
def test_the_text_is_the_tokenizers_own(tokenizer, process, how):
    given = {"add_generation_prompt": not how} | how
    wanted = tokenizer.apply_chat_template(TALK, tokenize=False, **given)
    assert rendering(tokenizer, TALK, **how).text() == process.render(rendering(tokenizer, TALK, **how)) == wanted


def test_the_default_of_several_templates(tokenizer, process, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", {"default": "{{ eos_token }}{{ messages[0].content }}", "rag": ""})
    assert process.render(rendering(tokenizer, TALK)) == "<|im_end|>Name a river."


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (FOR_EVER, "took more than 0.7 seconds of processor time"),
        ("{{ 10 ** (10 ** 10) }}", "took more than 0.7 seconds of processor time"),  # within one instruction
        ("{{ 'x' * 10 ** 11 }}", "does not fit the model's chat template: MemoryError"),
        ("{{ 'x' * 3000000 }}", "made 3000000 characters of these messages, at most 100"),
        ("{{ raise_exception('no') }}", "does not fit the model's chat template: TemplateError: no"),
        ("{{ 'x' * how }}", "does not fit the model's chat template: "),
    ],
)
def test_a_template_has_limits(tokenizer, process, monkeypatch, template, message):
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(UserError, match=message):
            process.render(rendering(tokenizer, TALK))
    asked = rendering(tokenizer, TALK)
    assert process.render(asked) == asked.text(), "the next one is served"


def test_a_child_that_was_killed_is_replaced(tokenizer, process):
    asked = rendering(tokenizer, TALK)
    process.render(asked)
    os.kill(process.child.pid, signal.SIGKILL)
    process.child.wait()
    assert process.render(asked) == asked.text()


def test_what_cannot_be_sent(tokenizer, process, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ how }}")
    with pytest.raises(UserError, match="cannot be sent to another process: "):
        process.render(rendering(tokenizer, TALK, chat_template_kwargs={"how": lambda: 3}))


def test_the_end(tokenizer):
    own = TemplateProcess()
    child = own.start()
    own.close()
    own.close()
    assert child.returncode == -signal.SIGKILL
    with pytest.raises(RuntimeError, match="was shut down"):
        own.render(rendering(tokenizer, TALK))
