"""What sequences of training data begin with: prompts drawn from the grammar, and messages that the target writes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.engine.engine import sample_seed
from jaxspec.engine.request import Request
from jaxspec.sampling_params import SamplingParams
from jaxspec.train.prompts import CATEGORIES, draw

if TYPE_CHECKING:
    from jaxspec.llm import LLM
    from jaxspec.train.generate import DataOptions

TRIES = 100  # draws of a prompt that is short enough
# Of the user's messages. At 0.8 SmolLM2's begin alike ("Can you", "I'm considering") and keep to few subjects; at 1
# three of four still end and make sense.
MESSAGE_TEMPERATURE = 1.0
MESSAGE_TRIES = 32  # a target that ends half of its messages runs out of them once in four billion


@dataclasses.dataclass(frozen=True)
class Opening:
    """What a sequence begins with, and how it goes on.

    category: index into CATEGORIES; temperature, seed: of the answer. attempt: where the target has still to write the
    user's message, which follows ids, the number of the try, from 1 on; else 0.
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

    Raises ValueError where a category has no prompt that is short enough.
    """
    rng = random.Random(f"{options.seed}/{shard}")
    rows = range(options.shard_size)
    categories = [pick(options.mixture, rng) for _ in rows]
    temperatures = [pick(options.temperatures, rng) for _ in rows]
    seeds = [int(rng.random() * 2**53) for _ in rows]
    own = [row for row in rows if categories[row] == "self"]
    found: dict[int, list[int]] = {}
    for _ in range(TRIES):
        missing = [row for row in rows if row not in found and categories[row] != "self"]
        if not missing:
            break
        ids = encoded(llm, [(categories[row], draw(categories[row], rng)) for row in missing])
        found |= {row: prompt for row, prompt in zip(missing, ids, strict=True) if len(prompt) <= options.length // 2}
    else:
        raise too_long(categories[missing[0]], options.length)
    if own:
        before, after = around_ids(llm.tokenizer)
        if len(before) + options.length // 4 + len(after) > options.length // 2:
            raise too_long("self", options.length)
        found |= dict.fromkeys(own, before)
    return [
        Opening(
            category=CATEGORIES.index(categories[row]),
            ids=found[row],
            # From the bare beginning there is but one greedy text.
            temperature=1.0 if categories[row] == "free" and len(found[row]) == 1 else temperatures[row],
            seed=seeds[row],
            attempt=int(categories[row] == "self"),
        )
        for row in rows
    ]


def too_long(category: str, length: int) -> ValueError:
    return ValueError(
        f"no prompt of category {category!r} fits into half of length={length}: raise --length or leave the category "
        "out of --mixture"
    )


def with_message(llm: LLM, opening: Opening, request: Request) -> Opening:
    """The opening with the message that the target wrote, or for the next attempt where it wrote none (Xu et al.,
    Magpie, https://arxiv.org/abs/2406.08464: a chat model that is shown the beginning of a user's turn ends it).

    Raises ValueError after MESSAGE_TRIES.
    """
    *message, _ = request.output
    if request.finish_reason == "stop" and llm.tokenizer.decode(message, skip_special_tokens=True).strip():
        # The ids as the target wrote them: the text may have other ones, of which it did not say what follows.
        return dataclasses.replace(opening, ids=[*opening.ids, *message, *around_ids(llm.tokenizer)[1]], attempt=0)
    if opening.attempt == MESSAGE_TRIES:
        raise ValueError(
            f"the target ended no message of its own within {request.params.max_tokens} tokens in {MESSAGE_TRIES} "
            "tries: leave self out of --mixture, or raise --length, a quarter of which it may take"
        )
    return dataclasses.replace(opening, attempt=opening.attempt + 1)


def pick(shares: Mapping[Any, float], rng: random.Random) -> Any:
    """A key, by its share."""
    at = rng.random() * sum(shares.values())
    for key, share in shares.items():
        at -= share
        if at < 0:
            return key
    return key


def encoded(llm: LLM, prompts: list[tuple[str, str]]) -> list[list[int]]:
    """Prompts (category, text) as token ids: user messages in the chat template, free text as LLM.generate takes it."""
    tokenizer = llm.tokenizer
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ids: dict[int, list[int]] = {i: [first] for i, (_, text) in enumerate(prompts) if not text}
    for free in (True, False):
        chosen = [i for i, (category, text) in enumerate(prompts) if text and (category == "free") == free]
        if chosen:
            texts = [prompts[i][1] if free else conversation(tokenizer, prompts[i][1]) for i in chosen]
            ids |= zip(chosen, tokenizer(texts, add_special_tokens=free)["input_ids"], strict=True)
    return [ids[i] for i in range(len(prompts))]


def conversation(tokenizer: Any, text: str) -> str:
    """The user's message in the chat template, which is rendered once: that takes longer than all the rest."""
    before, after = around(tokenizer)
    return before + text + after


@functools.lru_cache(maxsize=1)
def around(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and after a user's message."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("this model has no chat template: generate with --mixture free:1")
    mark = "\x01message\x01"
    message = {"role": "user", "content": mark}
    rendered = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, *rest = rendered.split(mark)
    if len(rest) != 1:
        raise ValueError("this model's chat template does not show a message once: generate with --mixture free:1")
    return before, rest[0]


@functools.lru_cache(maxsize=1)
def around_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids of `around`: those that two conversations share. On their own its texts may have others, as where a
    tokenizer puts a space in front."""
    one, other = tokenizer([conversation(tokenizer, text) for text in "ab"], add_special_tokens=False)["input_ids"]
    return common(one, other), common(one[::-1], other[::-1])[::-1]


def common(one: list[int], other: list[int]) -> list[int]:
    """What both begin with."""
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
