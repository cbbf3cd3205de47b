"""What sequences of training data begin with: prompts drawn from the grammar, and messages that the target writes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.common.errors import UserError
from jaxspec.engine.arrivals import sample_seed
from jaxspec.engine.request import Request
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.train.data_options import DataOptions
from jaxspec.train.prompts import CATEGORIES, DRAWN, WRITTEN, draw

if TYPE_CHECKING:
    from jaxspec.api.llm import LLM

TRIES = 100  # draws of a prompt that is short enough
# Of the user's messages. At 0.8 SmolLM2's begin alike ("Can you", "I'm considering") and keep to few subjects; at 1
# three of four still end and make sense.
MESSAGE_TEMPERATURE = 1.0
MESSAGE_TRIES = 32  # a target that ends half of its messages runs out of them once in four billion


@dataclasses.dataclass(frozen=True)
class Opening:
    """What a sequence begins with, and how it goes on.

    category: index into CATEGORIES.
    temperature, seed: of the answer.
    attempt: where the target has still to write the user's message, or the rest of it, which follows ids, the number of
      the try, from 1 on; else 0.
    """

    category: int
    ids: list[int]
    temperature: float
    seed: int
    attempt: int = 0

    def params(self, length: int) -> SamplingParams:
        """Of the message, or of the answer. length: longest sequence."""
        if self.attempt:
            seed = sample_seed(self.seed, self.attempt)
            return SamplingParams(temperature=MESSAGE_TEMPERATURE, seed=seed, max_tokens=length // 4)
        return SamplingParams(temperature=self.temperature, seed=self.seed, max_tokens=length - len(self.ids))


def openings(llm: LLM, options: DataOptions, shard: int) -> list[Opening]:
    """What the sequences of a shard begin with: a function of the recipe and the shard's number.

    Raises UserError where a category has no prompt that is short enough.
    """
    rng = random.Random(f"{options.seed}/{shard}")
    rows = range(options.shard_size)
    categories = [pick(options.mixture, rng) for _ in rows]
    temperatures = [pick(options.temperatures, rng) for _ in rows]
    seeds = [int(rng.random() * 2**53) for _ in rows]
    most = dict.fromkeys(categories, options.length // 2)
    found: dict[int, list[int]] = {}
    for category in most.keys() & WRITTEN:
        before, after = around_ids(llm.tokenizer)
        most[category] -= options.length // 4 + len(after)
        if len(before) > most[category]:
            raise too_long(category, options.length)
        found |= {row: before for row in rows if categories[row] == "self"}
    for _ in range(TRIES):
        missing = [row for row in rows if row not in found]
        if not missing:
            break
        drawn = [draw(categories[row], rng) if categories[row] in DRAWN else begun(options, rng) for row in missing]
        ids = encoded(llm, [(categories[row], text) for row, text in zip(missing, drawn, strict=True)])
        found |= {row: prompt for row, prompt in zip(missing, ids, strict=True) if len(prompt) <= most[categories[row]]}
    else:
        raise too_long(categories[missing[0]], options.length)
    return [
        Opening(
            category=CATEGORIES.index(categories[row]),
            ids=found[row],
            # From the bare beginning there is but one greedy text.
            temperature=1.0 if categories[row] == "free" and len(found[row]) == 1 else temperatures[row],
            seed=seeds[row],
            attempt=int(categories[row] in WRITTEN),
        )
        for row in rows
    ]


def begun(options: DataOptions, rng: random.Random) -> str:
    """The first words of a message, up to half of one, of a category of the mixture that the grammar has. What the
    target makes of them is about far more subjects than the grammar is, and more like what users ask than what it says
    by itself."""
    drawn = {name: options.mixture.get(name, 0.0) for name in DRAWN if name != "free"}
    words = draw(pick(drawn if any(drawn.values()) else dict.fromkeys(drawn, 1.0), rng), rng).split(" ")
    return " ".join(words[: 1 + int(rng.random() * len(words) / 2)])


def too_long(category: str, length: int) -> UserError:
    return UserError(
        f"no prompt of category {category!r} fits into half of length={length}: raise --length or leave the category "
        "out of --mixture"
    )


def with_message(llm: LLM, opening: Opening, request: Request) -> Opening:
    """The opening with the message that the target wrote, or for the next attempt where it wrote none (Xu et al.,
    Magpie, https://arxiv.org/abs/2406.08464: a chat model that is shown the beginning of a user's turn ends it).

    Raises UserError after MESSAGE_TRIES.
    """
    before, after = around_ids(llm.tokenizer)
    ids = [*opening.ids, *request.output[:-1]]
    message = llm.tokenizer.decode(ids[len(before) :], skip_special_tokens=True)
    if request.finish_reason == "stop" and message.strip():
        # The ids as the target wrote them: the text may have other ones, of which it did not say what follows.
        return dataclasses.replace(opening, ids=[*ids, *after], attempt=0)
    if opening.attempt == MESSAGE_TRIES:
        raise UserError(
            f"the target ended no message of its own within {request.params.max_tokens} tokens in {MESSAGE_TRIES} "
            f"tries: leave {' and '.join(WRITTEN)} out of --mixture, or raise --length, a quarter of which it may take"
        )
    # Words that it does not go on from as a user would are given up.
    kept = opening.ids if opening.attempt < MESSAGE_TRIES // 2 else before
    return dataclasses.replace(opening, ids=kept, attempt=opening.attempt + 1)


def pick(shares: Mapping[Any, float], rng: random.Random) -> Any:
    """A key, by its share."""
    at = rng.random() * sum(shares.values())
    for key, share in shares.items():
        at -= share
        if at < 0:
            return key
    return key


def encoded(llm: LLM, prompts: list[tuple[str, str]]) -> list[list[int]]:
    """Prompts (category, text) as token ids: user messages in the chat template, the first words of one after what it
    puts before a message, free text as LLM.generate takes it."""
    tokenizer = llm.tokenizer
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ids: dict[int, list[int]] = {i: [first] for i, (_, text) in enumerate(prompts) if not text}
    for free in (True, False):
        chosen = [i for i, (category, text) in enumerate(prompts) if text and (category == "free") == free]
        if chosen:
            texts = [prompts[i][1] if free else conversation(tokenizer, *prompts[i]) for i in chosen]
            ids |= zip(chosen, tokenizer(texts, add_special_tokens=free)["input_ids"], strict=True)
    return [ids[i] for i in range(len(prompts))]


def conversation(tokenizer: Any, category: str, text: str) -> str:
    """The user's message in the chat template, which is rendered once: that takes longer than all the rest. Of one that
    is only begun, the template up to there."""
    before, after = around(tokenizer)
    return before + text + ("" if category == "begun" else after)


@functools.lru_cache(maxsize=1)
def around(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and after a user's message."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("this model has no chat template: generate with --mixture free:1")
    mark = "\x01message\x01"
    message = {"role": "user", "content": mark}
    rendered = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, *rest = rendered.split(mark)
    if len(rest) != 1:
        raise UserError("this model's chat template does not show a message once: generate with --mixture free:1")
    return before, rest[0]


@functools.lru_cache(maxsize=1)
def around_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids of `around`: those that two conversations share. On their own its texts may have others, as where a
    tokenizer puts a space in front."""
    texts = [conversation(tokenizer, "chat", text) for text in "ab"]
    one, other = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return common(one, other), common(one[::-1], other[::-1])[::-1]


def common(one: list[int], other: list[int]) -> list[int]:
    """What both begin with."""
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
