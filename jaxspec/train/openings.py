"""Openings (first tokens) of training sequences: prompts drawn from a grammar, and messages that the target writes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.common.errors import UserError
from jaxspec.engine.admission import sample_seed
from jaxspec.engine.request import Request
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.train.data_options import DataOptions
from jaxspec.train.prompts import CATEGORIES, DRAWN, WRITTEN, draw

if TYPE_CHECKING:
    from jaxspec.api.llm import LLM

TRIES = 100  # largest number of draws for a prompt that is short enough
# Temperature of the user messages that the target writes. At 0.8, SmolLM2's messages begin alike ("Can you", "I'm
# considering") and cover few subjects. At 1, three of four messages still end and make sense.
MESSAGE_TEMPERATURE = 1.0
# Largest number of attempts at a message. A target that ends half of its messages fails in all attempts once in four
# billion cases.
MESSAGE_TRIES = 32


@dataclasses.dataclass(frozen=True)
class Opening:
    """The first tokens of a sequence, and the parameters with which the target continues it.

    category: index of the prompt's category in CATEGORIES.
    ids: ids of the first tokens.
    temperature, seed: sampling parameters of the answer.
    attempt: 0 if the target writes the answer next. Else it must first write the user's message, or the rest of it,
      after `ids`; attempts at this are numbered from 1.
    """

    category: int
    ids: list[int]
    temperature: float
    seed: int
    attempt: int = 0

    def params(self, length: int) -> SamplingParams:
        """Return the sampling parameters of what the target writes next, the user's message or the answer.

        length: largest number of tokens in a sequence, opening and answer together.
        """
        if self.attempt:
            seed = sample_seed(self.seed, self.attempt)
            return SamplingParams(temperature=MESSAGE_TEMPERATURE, seed=seed, max_tokens=length // 4)
        return SamplingParams(temperature=self.temperature, seed=self.seed, max_tokens=length - len(self.ids))


def openings(llm: LLM, options: DataOptions, shard: int) -> list[Opening]:
    """Return the openings (first tokens) of a shard's sequences. They depend only on the options and the shard's index.

    Raises: UserError if no prompt of a category is short enough, or if a category needs a chat template that the model
      lacks.
    """
    rng = random.Random(f"{options.seed}/{shard}")
    rows = range(options.shard_size)
    categories = [pick(options.mixture, rng) for _ in rows]
    temperatures = [pick(options.temperatures, rng) for _ in rows]
    seeds = [int(rng.random() * 2**53) for _ in rows]
    most = dict.fromkeys(categories, options.length // 2)  # largest number of tokens in an opening, by category
    found: dict[int, list[int]] = {}  # token ids of the openings so far, by row
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
        for row, prompt in zip(missing, ids, strict=True):
            if len(prompt) <= most[categories[row]]:
                found[row] = prompt
    else:
        raise too_long(categories[missing[0]], options.length)
    return [
        Opening(
            category=CATEGORIES.index(categories[row]),
            ids=found[row],
            # All openings without text are the same, with one greedy continuation. So the continuation is sampled.
            temperature=1.0 if categories[row] == "free" and len(found[row]) == 1 else temperatures[row],
            seed=seeds[row],
            attempt=int(categories[row] in WRITTEN),
        )
        for row in rows
    ]


def begun(options: DataOptions, rng: random.Random) -> str:
    """Return the first words of a user's message: at least one word, at most about half of the message.

    The message is drawn from the grammar, from a random category of the mixture other than "free". If the mixture has
    no such category, all categories of the grammar but "free" are equally likely.

    The target completes the message. Such messages cover far more subjects than the grammar. They also resemble users'
    questions more than messages that the target writes without given first words.
    """
    shares = {name: options.mixture.get(name, 0.0) for name in DRAWN if name != "free"}
    if not any(shares.values()):
        shares = dict.fromkeys(shares, 1.0)
    words = draw(pick(shares, rng), rng).split(" ")
    return " ".join(words[: 1 + int(rng.random() * len(words) / 2)])


def too_long(category: str, length: int) -> UserError:
    """Return the error for a category that has no prompt that is short enough."""
    return UserError(
        f"no prompt of category {category!r} fits into half of length={length}: raise --length or leave the category "
        "out of --mixture"
    )


def with_message(llm: LLM, opening: Opening, request: Request) -> Opening:
    """Return the opening with the message that the target wrote, or the next attempt's opening if it completed none.

    A chat model that is given the beginning of a user's turn completes it: Xu et al., Magpie,
    https://arxiv.org/abs/2406.08464.

    request: the finished request of the attempt.

    Raises: UserError after MESSAGE_TRIES attempts.
    """
    before, after = around_ids(llm.tokenizer)
    ids = [*opening.ids, *request.output[:-1]]
    message = llm.tokenizer.decode(ids[len(before) :], skip_special_tokens=True)
    if request.finish_reason == "stop" and message.strip():
        # The message keeps the ids that the target wrote. Tokenising its text could give other ids.
        return dataclasses.replace(opening, ids=[*ids, *after], attempt=0)
    if opening.attempt == MESSAGE_TRIES:
        raise UserError(
            f"the target ended no message of its own within {request.params.max_tokens} tokens in {MESSAGE_TRIES} "
            f"tries: leave {' and '.join(WRITTEN)} out of --mixture, or raise --length, a quarter of which it may take"
        )
    # The second half of the attempts drops the given first words, which the target may be unable to complete.
    kept = opening.ids if opening.attempt < MESSAGE_TRIES // 2 else before
    return dataclasses.replace(opening, ids=kept, attempt=opening.attempt + 1)


def pick(shares: Mapping[Any, float], rng: random.Random) -> Any:
    """Return a random key of `shares`. A key's probability is proportional to its share."""
    at = rng.random() * sum(shares.values())
    for key, share in shares.items():
        at -= share
        if at < 0:
            return key
    return key


def encoded(llm: LLM, prompts: list[tuple[str, str]]) -> list[list[int]]:
    """Return the token ids of prompts, each given as (category, text).

    Free text is encoded as LLM.generate does it, user messages within the chat template. First words of a message
    follow the template's beginning, and nothing follows them. An empty text is the BOS token, or EOS if there is none.
    """
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
    """Return the chat template's text with a user's message. For first words of a message, end with these words.

    The template is rendered once for all messages, because rendering takes longer than all the rest.
    """
    before, after = around(tokenizer)
    return before + text + ("" if category == "begun" else after)


@functools.lru_cache(maxsize=1)
def around(tokenizer: Any) -> tuple[str, str]:
    """Return the chat template's text before and after a user's message.

    Raises: UserError if there is no template, or if it does not contain a message exactly once.
    """
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
    """Return the chat template's token ids before and after a user's message.

    These are the ids that two conversations share at their beginnings and at their ends. Encoding the template's parts
    alone could give other ids, for example if the tokenizer puts a space in front.

    Raises: UserError as `around` does.
    """
    texts = [conversation(tokenizer, "chat", text) for text in "ab"]
    one, other = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return common_prefix(one, other), common_prefix(one[::-1], other[::-1])[::-1]


def common_prefix(one: list[int], other: list[int]) -> list[int]:
    """Return the longest common prefix of two lists."""
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
