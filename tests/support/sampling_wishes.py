"""Every parameter of a request as rows of one batch: greedy rows beside seeded ones, some with log-probabilities.

So one program a drafter serves all that is tested about parameters.
"""

from __future__ import annotations

import dataclasses
import functools

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.grammars.automaton import Automaton
from jaxspec.options.sampling_params import SamplingParams
from tests.support import grammars
from tests.support.lively_models import FAMILY, VOCAB, new_engine, repeating, serve, texts

LONG = 20  # output tokens
END = (61, 62)  # ids that end the text of a grammar
METHODS = [("noisy", 4), ("noisy", 1), ("itself", 4), ("wrong", 4), ("ngram", 4), ("combined", 4), ("combined", 1)]
PROMPTS = (repeating(7, 3, 1), repeating(16, 5, 2), repeating(33, 7, 3))


@dataclasses.dataclass(frozen=True)
class Row:
    """A request of the batch.

    words: its bad words.
    automaton: of its grammar.
    """

    name: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    words: tuple[tuple[int, ...], ...] = ()
    automaton: Automaton | None = None


# Those of rows that have one, by their names below. Some draft tokens are legal and some are not.
AUTOMATA = {
    "a grammar": grammars.random(VOCAB, 9, seed=1, ends=END, legal=0.4),
    "another grammar": grammars.random(VOCAB, 30, seed=2, ends=END, legal=0.15),
    "a grammar beside everything": grammars.random(VOCAB, 9, seed=3, ends=END, legal=0.6),
}


def wishes(text: list[int]) -> dict[str, tuple[dict, tuple]]:
    """Name -> (SamplingParams' options, bad words), made for the text that the prompt has without them, so that each
    has something to do."""
    a, b, c, d = text[1:5]
    fresh = list(dict.fromkeys(text))
    return {
        "nothing": ({}, ()),
        "repetition": ({"repetition_penalty": 1.6}, ()),
        "rewarded repetition": ({"repetition_penalty": 0.8}, ()),
        "presence": ({"presence_penalty": 2.0}, ()),
        "frequency": ({"frequency_penalty": 2.0, "logprobs": 3}, ()),
        "bias": ({"logit_bias": {text[0]: -100.0, text[3]: 3.0, 5: 2.0}}, ()),
        "allowed": ({"allowed_token_ids": sorted({*range(0, VOCAB, 2)} - {text[0]})}, ()),
        "a bad word": ({}, ((text[0],), (text[2],))),
        "bad words of two": ({}, ((text[0], a), (a, b), (b, c))),
        "bad words of three": ({"logprobs": 0}, ((a, b, c), (text[0], a, b), (b, c, d), (0, 1))),
        "min_tokens": ({"min_tokens": 9, "stop_token_ids": fresh[1:4]}, ()),
        "stop ids": ({"stop_token_ids": [fresh[min(3, len(fresh) - 1)]]}, ()),
        "two drafts": ({"num_speculative_tokens": 1, "presence_penalty": 1.0}, ()),
        "no drafts": ({"num_speculative_tokens": 0, "frequency_penalty": 1.0}, ()),
        "everything": (
            {
                "repetition_penalty": 1.2,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.3,
                "logit_bias": {3: 1.0, a: -2.0},
                "allowed_token_ids": list(range(VOCAB - 9)),
                "min_tokens": 7,
                "stop_token_ids": fresh[2:4],
                "logprobs": 5,
            },
            ((text[0],), (a, b), (a, b, c)),
        ),
        "a grammar": ({}, ()),
        "another grammar": ({"num_speculative_tokens": 1}, ()),
        "a grammar beside everything": (
            {
                "repetition_penalty": 1.2,
                "frequency_penalty": 0.3,
                "logit_bias": {3: 1.0, a: -2.0},
                "allowed_token_ids": list(range(VOCAB - 9)),
                "min_tokens": 7,
                "logprobs": 2,
            },
            ((text[0],), (a, b)),
        ),
    }


@functools.cache
def batch(family: str) -> tuple[Row, ...]:
    """Greedy and seeded, a prompt for each parameter."""
    rows = []
    for kind, how in (("greedy", {"temperature": 0.0}), ("seeded", {"temperature": 0.8, "top_k": 20})):
        base = [SamplingParams(max_tokens=LONG, **how, seed=40 + i) for i in range(len(PROMPTS))]
        free = texts(serve(plain(family), PROMPTS, base))
        for i, name in enumerate(wishes(free[0])):
            at = i % len(PROMPTS)
            options, words = wishes(free[at])[name]
            sampling = SamplingParams(max_tokens=LONG, **how, **options, seed=40 + at)
            rows.append(Row(f"{kind}: {name}", PROMPTS[at], sampling, words, AUTOMATA.get(name)))
    return tuple(rows)


@functools.cache
def plain(family: str) -> Engine:
    return new_engine("plain", 0, family, max_num_seqs=32, num_pages=256)


def answers(engine: Engine, rows: tuple[Row, ...], rounds: int | None = None) -> dict[str, Request]:
    lists = {"bad_words": [r.words for r in rows], "automata": [r.automaton for r in rows]}
    requests = serve(engine, [r.prompt for r in rows], [r.sampling for r in rows], rounds=rounds, **lists)
    return {row.name: request for row, request in zip(rows, requests, strict=True)}


@functools.cache
def expected(family: str) -> dict[str, Request]:
    return answers(plain(family), batch(family))


@functools.cache
def speculative(method: str, k: int) -> Engine:
    return new_engine(method, k, FAMILY[method], max_num_seqs=32, num_pages=256)


@functools.cache
def found(method: str, k: int) -> dict[str, Request]:
    return answers(speculative(method, k), batch(FAMILY[method]))
