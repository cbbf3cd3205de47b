"""Prompts in the answers of completions with `echo`, before the output."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jaxspec.api.detokenizer import Detokenizer
from jaxspec.api.prompts import PromptRequest


@dataclasses.dataclass(frozen=True)
class Echo:
    """A prompt as answers repeat it.

    text: the prompt's text, as the client gave it; for a prompt of token ids their text, special tokens included.
    ids: token ids.
    tokens: text of each token.
    offsets: index in `text` at which each token begins, in characters.
    """

    text: str
    ids: list[int]
    tokens: list[str]
    offsets: list[int]


def echo_of(tokenizer: Any, ask: PromptRequest) -> Echo:
    """Return a prompt as answers repeat it."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, placed=True)
    with contextlib.suppress(Exception):  # if the tokenizer fails, each later token gets its text by itself
        detokenizer.feed(ask.ids)
    tokens = [token.text or "" for token in detokenizer.tokens(ask.ids, ended=True)]
    decoded = "".join(tokens)
    text = decoded if ask.text is None else ask.text
    start = max(decoded.find(text), 0)  # tokens that the tokenizer adds, such as a BOS, are not in the text
    ends = itertools.accumulate(map(len, tokens[:-1]), initial=0)
    return Echo(text, ask.ids, tokens, [min(max(end - start, 0), len(text)) for end in ends])


def echoes(tokenizer: Any, asks: Sequence[PromptRequest], n: int) -> dict[int, Echo]:
    """Return the prompts as answers repeat them, by index of the sample in the answer. n: samples of each prompt."""
    made = [echo_of(tokenizer, ask) for ask in asks]
    return {index: made[index // n] for index in range(n * len(made))}
