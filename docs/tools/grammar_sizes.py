"""Prints the table of docs/structured-outputs.md: for six schemas, the size of the automaton and the time to build it.

python docs/tools/grammar_sizes.py: over SmolLM2's vocabulary, and over one of 151,936 ids that is made of it.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import checkpoints
from jaxspec.api.grammars import grammar_vocabulary
from jaxspec.common.embedded import MODEL
from jaxspec.grammars.build import automaton
from jaxspec.grammars.requests import StructuredOutputs
from jaxspec.grammars.vocabulary import Vocabulary

LARGE = 151_936  # ids of Qwen3's vocabulary
TEXT = {"type": "string"}
ADDRESS = {
    "type": "object",
    "properties": {"street": TEXT, "city": TEXT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["street", "city"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "one of twelve labels": {
        "json": {
            "enum": [
                f"{kind} {topic}" for kind in ("new", "open", "closed") for topic in ("bug", "wish", "doubt", "praise")
            ]
        }
    },
    "extraction: eight fields, three of them optional": {
        "json": {
            "type": "object",
            "properties": {
                "name": TEXT,
                "email": {"type": "string", "format": "email"},
                "birthday": {"type": "string", "format": "date"},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "height": {"type": "number"},
                "married": {"type": "boolean"},
                "nationality": {"anyOf": [TEXT, {"type": "null"}]},
                "role": {"enum": ["customer", "supplier", "employee"]},
            },
            "required": ["name", "email", "birthday", "age", "role"],
        }
    },
    "call of one of three tools": {
        "json": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": name},
                        "arguments": {"type": "object", "properties": arguments, "required": [*arguments]},
                    },
                    "required": ["name", "arguments"],
                }
                for name, arguments in {
                    "get_weather": {"city": TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}},
                    "search": {"query": TEXT, "limit": {"type": "integer", "minimum": 1, "maximum": 50}},
                    "send_mail": {"to": {"type": "string", "format": "email"}, "subject": TEXT, "body": TEXT},
                }.items()
            ]
        }
    },
    "nested: an order of addresses and lines": {
        "json": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "format": "uuid"},
                "buyer": ADDRESS,
                "delivery": ADDRESS,
                "lines": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"article": TEXT, "count": {"type": "integer"}, "price": {"type": "number"}},
                        "required": ["article", "count", "price"],
                    },
                    "minItems": 1,
                },
            },
            "required": ["id", "buyer", "lines"],
        }
    },
    "long list: 100 scores from 0 to 10, and a summary of 280 characters": {
        "json": {
            "type": "object",
            "properties": {
                "scores": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0, "maximum": 10},
                    "minItems": 100,
                    "maxItems": 100,
                },
                "summary": {"type": "string", "maxLength": 280},
            },
            "required": ["scores", "summary"],
        }
    },
    "json_object": {"json_object": True},
}


def larger(known: Vocabulary, size: int) -> Vocabulary:
    """Return a vocabulary with this many more tokens, each two tokens of the known one put together."""
    random, texts = np.random.default_rng(0), [token for token in known.tokens if token]
    tokens = dict.fromkeys(texts)
    while len(tokens) < size - 17:  # as many special tokens as SmolLM2 has
        first, second = random.integers(len(texts), size=2)
        tokens[texts[first] + texts[second]] = None
    return Vocabulary((*[None] * 17, *tokens), end_ids=(0,), size=size)


def measured(given: dict[str, Any], vocabulary: Vocabulary) -> str:
    """Return the cells of one schema over one vocabulary."""
    form = StructuredOutputs.of(given)
    assert form is not None
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        found = automaton(form, vocabulary)
        seconds.append(time.perf_counter() - started)
    states, classes = found.next.shape
    kilobytes = 2 * (vocabulary.size + states * classes) / 1000
    forced = np.mean(found.legal_counts() == 1)
    return f" {states:,} | {classes} | {kilobytes:,.0f} kB | {min(seconds):.2f} s | {forced:.0%} |"


def main() -> None:
    """Print the table."""
    source = checkpoints.resolve(MODEL)
    tokenizer = checkpoints.load_tokenizer(source)
    small = grammar_vocabulary(tokenizer, [tokenizer.eos_token_id], len(tokenizer))
    for vocabulary in (small, larger(small, LARGE)):
        _ = vocabulary.digest, vocabulary.text_tokens  # computed once for all grammars
        print(f"\n| {vocabulary.size:,} ids | states | classes | table | time to build | states with one legal token |")
        print("|---|---|---|---|---|---|")
        for name, given in SCHEMAS.items():
            print(f"| {name} |{measured(given, vocabulary)}")


if __name__ == "__main__":
    main()
