"""The detokenizer: the growing text of token ids, the text that each id adds, and the search for stop strings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from jaxspec.api.tokens import Token, Window, vocabulary


class Detokenizer:
    """The text of one request's output.

    stop: stop strings.
    min_tokens: number of first tokens. A stop string that is complete within these tokens is ignored.
    skip_special_tokens: whether special tokens are left out of the text.
    placed: whether the method `tokens` will be called, which needs the text that each id adds.
    hidden: ids that end the output and are left out of its text.
    text: the part of the text that will not change whatever ids follow.
    stop_string, stop_at: the stop string that occurs in the text, if any, and the index of its first character.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        placed: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.min_tokens = min_tokens
        self.skip_special_tokens = skip_special_tokens
        self.placed = placed
        self.known = vocabulary(tokenizer)
        self.special = self.known.special if skip_special_tokens else {}
        self.hidden: frozenset[int] = frozenset()
        # Special tokens whose texts are stop strings. The search in the text misses them, because the text lacks them.
        self.stop_ids = {i: text for i, text in self.special.items() if text in stop} if stop else {}
        self.begin()

    def begin(self) -> None:
        """Start again with an empty text."""
        self.num_fed = -1  # number of ids in the text; -1 marks a state that an interrupt has made invalid
        self.text = ""
        self.reader = self.known.reader(self.known, self.skip_special_tokens)
        self.ends: list[int] = []  # if `placed`, the length of `text` after each id
        self.stop_string: str | None = None
        self.stop_at = 0
        self.num_fed = 0

    def shown(self, i: int) -> bool:
        """Return whether this id appears in the text."""
        return i not in self.hidden and i not in self.special

    def find_stop(self, ids: list[int], start: int) -> int | None:
        """Add ids[start:] to the text, up to the id that completes a stop string. Return the number of ids to keep.

        Return None if no stop string is complete. One that is complete within the first min_tokens ids is ignored.
        """
        if start != self.num_fed:  # true after an interrupted call, whose ids may have been dropped since
            self.begin()
            start = 0
        for end in range(start + 1, len(ids) + 1):
            known = len(self.text)
            self.feed(ids, end)
            if end <= self.min_tokens:
                continue
            string = self.stop_ids.get(ids[end - 1])
            if string is not None:
                text = self.text + self.reader.rest()
                if not self.contains_stop(text, known):
                    self.stop_string, self.stop_at = string, len(text)
                return end
            if self.contains_stop(self.text, known):
                return end
        return None

    def contains_stop(self, text: str, known: int) -> bool:
        """Return whether a text holds a stop string, and record it. known: number of characters searched before."""
        for string in self.stop:
            at = text.find(string, max(0, known - len(string) + 1))
            if at >= 0:
                self.stop_string, self.stop_at = string, at
                return True
        return False

    def feed(self, ids: Sequence[int], end: int | None = None) -> None:
        """Extend the text to that of ids[:end], all ids by default. `ids` begins with the ids of earlier calls."""
        if self.num_fed < 0:
            self.begin()
        start = self.num_fed
        end = len(ids) if end is None else end
        self.num_fed = -1  # marks the state as invalid until all ids are added
        new_ids = ids[start:end]
        for new in [[i] for i in new_ids] if self.placed else [new_ids]:
            self.text += self.reader.read([i for i in new if self.shown(i)])
            if self.placed:
                self.ends.append(len(self.text))
        self.num_fed = end

    def finish(self, ids: Sequence[int], *, include_stop: bool) -> str:
        """Return the final text, cut at the stop string if there is one.

        The text that was held back at the end of the output can complete a stop string.

        include_stop: whether the stop string stays in the text.
        """
        if self.stop_string is None:
            self.feed(ids)
            text = self.text + self.reader.rest()
            if len(ids) <= self.min_tokens or not self.contains_stop(text, len(self.text)):
                return text
        text = self.text + self.reader.rest()
        cut = text[: self.stop_at]
        return cut + (self.stop_string or "") if include_stop else cut

    def settled(self) -> int:
        """Return the number of characters that a stream can show.

        An end of the text that may be the beginning of a stop string is held back.
        """
        return len(self.text) - max((overlap(self.text, string) for string in self.stop), default=0)

    def tokens(self, ids: Sequence[int], start: int = 0, *, ended: bool) -> list[Token]:
        """Return a Token for each id from index `start` on, with the text that this id adds to the whole text.

        A token that is left out of the text has the token's own text, and no bytes.

        ended: whether no further id follows. If so, an unfinished character at the end belongs to the last token in
          the text.
        """
        added = [self.added(ids, at) for at in range(start, len(ids))]
        last = next((at for at in reversed(range(len(added))) if added[at] is not None), -1)
        if ended and last >= 0:
            added[last] = f"{added[last]}{self.reader.rest()}"
        return [self.token(ids, at, text) for at, text in enumerate(added, start)]

    def added(self, ids: Sequence[int], at: int) -> str | None:
        """Return the text that the id at index `at` adds, or None for an id that is left out of the text."""
        if not self.shown(ids[at]):
            return None
        if at >= len(self.ends):  # true if the tokenizer failed at this id or an earlier one
            return self.known[ids[at]].text
        return self.text[self.ends[at - 1] if at else 0 : self.ends[at]]

    def token(self, ids: Sequence[int], at: int, text: str | None) -> Token:
        """Return the id at index `at` as a Token. text: text that the id adds, or None if it is left out."""
        own = self.known[ids[at]]
        if text is None:
            return Token(own.text, None)
        if self.known.reader is Window or own.data is None:
            return Token(text, text.encode())
        first = self.known.strips and not any(map(self.shown, itertools.islice(ids, at)))
        return Token(text, own.data.removeprefix(b" ") if first else own.data)


def overlap(text: str, string: str) -> int:
    """Return the length of the longest proper prefix of `string` with which `text` ends."""
    size = min(len(string) - 1, len(text))
    while size > 0:
        size = string.rfind(text[-1], 0, size) + 1  # the prefix has to end with the text's last character
        if text.endswith(string[:size]):
            break
        size -= 1
    return size
