"""The tokens of a model's vocabulary as a grammar reads them: their bytes, and those that end an output."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a vocabulary.

    tokens: bytes of each token id of the tokenizer; None or b"" for a token that is no part of a text.
    end_ids: ids that end an output, which are no part of its text.
    size: number of ids of the model, which may be larger than the tokenizer's.
    strips: whether the tokenizer removes a space at the start of an output.
    marks: ids of the tokens, such as </think>, that a request may name as the one after which its form begins, by the
      tokens' strings.
    """

    tokens: tuple[bytes | None, ...]
    end_ids: tuple[int, ...]
    size: int
    strips: bool = False
    marks: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def spelling(self, marks: Iterable[str]) -> Vocabulary:
        """Return the vocabulary in which the tokens of these marks are parts of texts."""
        spelt = {self.marks[mark]: mark.encode() for mark in marks if mark in self.marks}
        if not spelt:
            return self
        tokens = tuple(spelt.get(i, token) for i, token in enumerate(self.tokens))
        return dataclasses.replace(self, tokens=tokens)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of all that an automaton depends on."""
        found = hashlib.sha256(repr((self.end_ids, self.size, self.strips)).encode())
        for token in self.tokens:
            found.update(b"-" if token is None else b"%d:%b" % (len(token), token))
        return found.hexdigest()

    @functools.cached_property
    def text_tokens(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Tokens with bytes as (ids i64[T], index of the first byte i64[T], lengths i64[T], bytes u8[_])."""
        ends = frozenset(self.end_ids)
        ids = [i for i, token in enumerate(self.tokens[: self.size]) if token and i not in ends]
        known = [self.tokens[i] or b"" for i in ids]
        lengths = np.array([len(token) for token in known], np.int64)
        starts = np.cumsum(lengths) - lengths
        return np.array(ids, np.int64), starts, lengths, np.frombuffer(b"".join(known), np.uint8)
