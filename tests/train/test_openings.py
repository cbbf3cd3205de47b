"""How training texts begin: prompts, the target's own messages, and messages that it is given the first words of."""

from __future__ import annotations

import dataclasses
import functools
import random

import numpy as np
import pytest

from jaxspec.api.llm import LLM
from jaxspec.engine.admission import sample_seed
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.train import data, generate, openings
from jaxspec.train.data_options import DataOptions
from jaxspec.train.prompts import CATEGORIES, grammar
from jaxspec.train.writer import engine_options
from tests.support.model_folders import BOS, CHAT_TEMPLATE, EOS, write_model
from tests.train.conftest import MIXTURE, OPTIONS


@pytest.mark.thorough
@pytest.mark.parametrize("category", ["self", "begun"])
def test_messages_are_what_the_target_says(llm, tmp_path, category):
    """Or how it ends them; and so are the answers to them."""
    options = DataOptions(**OPTIONS | {"tokens": 600, "mixture": {category: 1.0}})
    generate.generate(llm, tmp_path, options, progress=False)
    shard = data.load(tmp_path)
    assert (shard.category == CATEGORIES.index(category)).all()
    user, bot = llm.tokenizer.convert_tokens_to_ids(["<user>", "<bot>"])
    says = lambda prompt, wishes: [
        done.outputs[0] for done in llm.generate([prompt] * len(wishes), wishes, progress=False)
    ]
    tries = []
    for i, opening in enumerate(openings.openings(llm, options, 0)[:5]):
        prompt, answer = np.split(shard.tokens[i, : shard.length[i]], [shard.prompt_length[i]])
        seeds = [sample_seed(opening.seed, attempt) for attempt in range(1, 33)]
        assert (opening.ids == [BOS, user]) == (category == "self")
        wishes = [SamplingParams(temperature=1.0, seed=seed, max_tokens=32) for seed in seeds]
        tried = says(opening.ids, wishes[:16]) + says([BOS, user], wishes[16:])  # the given words are given up
        some = [one.finish_reason == "stop" and (one.text.strip() or len(opening.ids) > 2) for one in tried]
        tries.append(next(k for k, found in enumerate(some) if found))
        *message, end = tried[tries[-1]].token_ids
        assert end == EOS
        assert prompt.tolist() == [*(opening.ids if tries[-1] < 16 else [BOS, user]), *message, bot]
        wish = SamplingParams(temperature=opening.temperature, seed=opening.seed, max_tokens=128 - len(prompt))
        assert says(prompt.tolist(), [wish])[0].token_ids == answer.tolist()
    assert max(tries) > 0


def test_a_message_that_says_nothing_is_drawn_again(llm):
    class Request:
        finish_reason = "stop"

    before, encode = openings.around_ids(llm.tokenizer)[0], functools.partial(llm.tokenizer, add_special_tokens=False)
    opening = openings.Opening(0, before, 0.0, 1, attempt=1)
    for text, attempt in {"": 2, "\n ": 2, "Hello.": 0}.items():
        Request.output = [*encode(text)["input_ids"], EOS]
        assert openings.with_message(llm, opening, Request).attempt == attempt
    Request.output, words = [EOS], [*before, *encode("Hello.")["input_ids"]]
    assert openings.with_message(llm, dataclasses.replace(opening, ids=words), Request).attempt == 0


def test_words_that_the_target_does_not_go_on_from_are_given_up(llm):
    class Request:
        finish_reason, output = "length", [7] * 32

    before = openings.around_ids(llm.tokenizer)[0]
    opening = openings.Opening(0, [*before, 9, 9], 0.0, 1, attempt=1)
    for _ in range(20):
        opening = openings.with_message(llm, opening, Request)
        assert opening.ids == ([*before, 9, 9] if opening.attempt <= 16 else before)


def test_a_message_is_begun_with_words_of_the_mixtures_grammar():
    rng, options = random.Random(3), DataOptions(tokens=1, mixture={"list": 1.0, "begun": 1.0})
    texts = [openings.begun(options, rng) for _ in range(300)]
    firsts = {value.split()[0] for value in grammar()["list"]}
    assert {text.split()[0] for text in texts} <= firsts
    lengths = [len(text.split(" ")) for text in texts]
    assert min(lengths) == 1
    assert 3 <= max(lengths) <= 12
    rng, options = random.Random(3), DataOptions(tokens=1, mixture={"begun": 1.0})
    assert len({openings.begun(options, rng).split()[0] for _ in range(300)} - firsts) > 20


def test_messages_that_never_end(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(llm, "stop_ids", ())
    options = DataOptions(**OPTIONS | {"mixture": {"self": 1.0}})
    with pytest.raises(
        ValueError, match="ended no message of its own within 32 tokens in 32 tries: leave self and begun"
    ):
        generate.generate(llm, tmp_path, options, progress=False)
    assert not llm.engine.busy


@pytest.mark.thorough
def test_newcomers_come_in_few_numbers(llm, tmp_path, monkeypatch):
    """Every other number would compile another program."""
    monkeypatch.setattr(generate, "REFILL", 2)
    started, step = [], llm.engine.step

    def counting():
        started.append(len(llm.engine.scheduler.waiting))
        return step(8)  # messages end one by one

    monkeypatch.setattr(llm.engine, "step", counting)
    options = DataOptions(**OPTIONS | {"mixture": {"self": 2.0, "chat": 1.0, "free": 1.0}})
    generate.generate(llm, tmp_path, options, progress=False)
    last = max(i for i, count in enumerate(started) if count == 4)  # then no sequence is begun, but messages again
    assert sum(count not in (0, 4, 8) for count in started[:last]) <= 2
    assert started.count(4) > 10


def test_from_the_bare_beginning_nothing_is_greedy(llm):
    options = DataOptions(**OPTIONS | {"shard_size": 200, "mixture": {"free": 1.0}, "temperatures": {0.0: 1.0}})
    begun = openings.openings(llm, options, 0)
    bare = [opening for opening in begun if opening.ids == [BOS]]
    assert 0 < len(bare) < 40
    assert {opening.temperature for opening in bare} == {1.0}
    assert {opening.temperature for opening in begun if opening.ids != [BOS]} == {0.0}


def test_prompts_that_are_too_long(llm, tmp_path):
    options = DataOptions(**OPTIONS | {"mixture": {"summary": 1.0}})
    with pytest.raises(ValueError, match="no prompt of category 'summary' fits into half of length=128: raise"):
        generate.generate(llm, tmp_path, options, progress=False)


def test_without_a_chat_template(tmp_path):
    bare = write_model(tmp_path / "bare", chat=False)
    llm = LLM(str(bare), **engine_options(DataOptions(**OPTIONS)))
    for mixture in (MIXTURE, {"begun": 1.0}, {"self": 1.0}):
        options = DataOptions(**OPTIONS | {"mixture": mixture})
        with pytest.raises(ValueError, match="no chat template: generate with --mixture free:1"):
            generate.generate(llm, tmp_path / "out", options, progress=False)
    llm.tokenizer.chat_template = "One, two, three, four: count the words and count them again. " * 2 + CHAT_TEMPLATE
    with pytest.raises(ValueError, match="no prompt of category 'self' fits into half of length=128: raise"):
        generate.generate(llm, tmp_path / "out", options, progress=False)
