"""Grammars of requests: the tokenizer's vocabulary as they read it, and schemas given beside sampling parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.api.prompts import PromptRequest, named
from jaxspec.api.tokens import Window, vocabulary
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.grammars.automaton import Automaton
from jaxspec.grammars.library import Library
from jaxspec.grammars.requests import StructuredOutputs
from jaxspec.grammars.vocabulary import Vocabulary
from jaxspec.options.sampling_params import SamplingParams


class Marks(NamedTuple):
    """The tokens that open and close a model's reasoning. label: text after `open` that is not part of it."""

    open: str
    close: str
    label: str = ""


THINK = Marks("<think>", "</think>")
REASONING = (THINK, Marks("<|channel>", "<channel|>", "thought\n"))  # the second are those of Gemma 4


def grammar_vocabulary(tokenizer: Any, stop_ids: Sequence[int], vocab_size: int) -> Vocabulary:
    """Return the tokens of a tokenizer with their bytes.

    stop_ids: the model's own end ids.
    vocab_size: number of the model's ids, which may be larger than the tokenizer's.

    Raises: UserError for a tokenizer whose texts are not its tokens' bytes, and for a model without end ids.
    """
    known = vocabulary(tokenizer)
    if known.backend is None or known.reader is Window:
        raise UnsupportedError(
            "structured_outputs need a tokenizer of byte-level BPE, or of SentencePiece with byte tokens: this "
            "tokenizer's text is not that of its tokens, one after the other"
        )
    if not stop_ids:
        raise UserError("structured_outputs need a model with an end token: name it in the model's config.json")
    return Vocabulary(
        tokens=tuple(None if i in known.special else known[i].data for i in range(vocab_size)),
        end_ids=tuple(sorted(stop_ids)),
        size=vocab_size,
        strips=known.strips,
        marks={t.content: i for i, t in known.backend.get_added_tokens_decoder().items() if i < vocab_size},
    )


class Grammars:
    """The automata of an LLM's requests.

    tokenizer, stop_ids, vocab_size: as in `grammar_vocabulary`.
    cache: folder of cached files; None keeps no automata on disk.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], vocab_size: int, cache: Path | None) -> None:
        self.tokenizer = tokenizer
        tokens = functools.partial(grammar_vocabulary, tokenizer, stop_ids, vocab_size)
        self.library = Library(tokens, cache and cache / "grammars")

    def build(self, prompt: PromptRequest) -> Future[Automaton] | None:
        """Return the future automaton of a prompt's structured outputs; None if it has none.

        If the prompt ends inside of reasoning, as some chat templates end it, the form begins after the reasoning. If
        it ends after reasoning, the output has none.
        """
        grammar: StructuredOutputs | None = prompt.params.structured_outputs
        if grammar is None:
            return None
        if grammar.after is None or grammar.opening is not None:
            marks, mark = marks_of(self.tokenizer), last_mark(self.tokenizer, prompt.ids)
            if marks is not None and mark is not None:
                after = marks.close if mark == marks.open else None
                grammar = dataclasses.replace(grammar, after=after, opening=None)
        return self.library.build(grammar)


def marks_of(tokenizer: Any) -> Marks | None:
    """Return the marks of reasoning that are tokens of a tokenizer, or None."""
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return next((marks for marks in REASONING if marks.open in added and marks.close in added), None)


def last_mark(tokenizer: Any, ids: Sequence[int]) -> str | None:
    """Return the mark of reasoning with which a prompt ends, or None. At most white space stands after it.

    A mark elsewhere may be a user's text.
    """
    known = marks_of(tokenizer)
    if known is None:
        return None
    added = tokenizer.get_added_vocab()
    marks: dict[int, str] = {added[text]: text for text in (known.open, known.close)}
    if not any(mark in ids for mark in marks):
        return None
    backwards = list(ids[::-1])
    after = min(backwards.index(mark) for mark in marks if mark in ids)
    return None if after and tokenizer.decode(list(ids[-after:])).strip() else marks[backwards[after]]


def built(asked: list[PromptRequest]) -> list[PromptRequest]:
    """Return these prompts once their automata are built. Raise UserError for the first that cannot be."""
    for prompt in asked:
        named(prompt.index, prompt.built_automaton)
    return asked


def with_schema(params: Any, schema: Any) -> Any:
    """Return sampling parameters, one or a list, with structured_outputs={"json": schema}. schema: None for none.

    Raises: UserError if the parameters have structured outputs of their own.
    """
    if schema is None:
        return params
    if isinstance(params, list | tuple):
        return [with_schema(each, schema) for each in params]
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        return params  # refused later, where all parameters of a wrong type are
    if params.structured_outputs:
        raise UserError("sampling_params have structured_outputs of their own: leave schema out")
    return dataclasses.replace(params, structured_outputs={"json": schema})
