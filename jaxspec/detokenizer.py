"""Token ids -> text as it grows, and where a stop string cuts it."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "�"


class Detokenizer:
    """Text of one request's output. Decodes a short window at a time, because byte-level tokens join into characters
    and some tokenizers put a space in front depending on what stands before."""

    def __init__(
        self, tokenizer: Any, *, stop: tuple[str, ...] = (), min_tokens: int = 0, skip_special_tokens: bool = True
    ) -> None:
        self.tokenizer, self.stop, self.min_tokens = tokenizer, stop, min_tokens
        self.skip_special_tokens = skip_special_tokens
        self.hidden: frozenset[int] = frozenset()  # ids that end the output and are not part of its text
        self.stop_string: str | None
        self.stop_at: int  # where in the text the stop string begins
        self.begin()

    def begin(self) -> None:
        """No ids yet."""
        self.text, self.unfinished = "", ""  # unfinished: what can be read already before half a character
        self.window, self.read = 0, 0  # ids before `read` are in text; the window gives them context
        self.searched = self.num_fed = 0  # by find_stop: characters, ids
        self.stop_string, self.stop_at = None, 0

    def decode(self, ids: list[int]) -> str:
        ids = [i for i in ids if i not in self.hidden] if self.hidden else ids
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)

    def find_stop(self, ids: list[int], start: int) -> int | None:
        """Feeds ids one by one from index start on; the number of ids to keep once a stop string is complete. One that
        is complete within the first min_tokens ids ends nothing."""
        if start != self.num_fed:  # the last ones were fed by somebody who was interrupted before he could keep them
            self.begin()
            start = 0
        for end in range(start + 1, len(ids) + 1):
            self.num_fed = -1  # an interrupt from here on leaves nothing that is known
            self.feed(ids[:end])
            readable, known = self.text + self.unfinished, self.searched
            self.num_fed, self.searched = end, len(readable)
            if end <= self.min_tokens:
                continue
            for string in self.stop:
                at = readable.find(string, max(0, known - len(string) + 1))
                if at >= 0:
                    self.stop_string, self.stop_at = string, at
                    return end
        return None

    def feed(self, ids: list[int], *, last: bool = False) -> None:
        """Brings text up to ids (those so far and new ones). An unfinished character waits, unless this is the last."""
        before = self.decode(ids[self.window : self.read])
        now = self.decode(ids[self.window :])
        new = now[len(before) :]
        if new and (last or not new.endswith(REPLACEMENT)):
            # All or nothing: an interrupt cannot come within one call.
            vars(self).update(text=self.text + new, unfinished="", window=self.read, read=len(ids))
        else:
            self.unfinished = new.rstrip(REPLACEMENT)

    def finish(self, ids: list[int], *, include_stop: bool) -> str:
        """The final text, cut at the stop string."""
        if self.stop_string is None:
            self.feed(ids, last=True)
            return self.text
        return (self.text + self.unfinished)[: self.stop_at + (len(self.stop_string) if include_stop else 0)]

    def settled(self) -> int:
        """How much of text can be shown already: what might be the beginning of a stop string is held back."""
        return len(self.text) - max((overlap(self.text, string) for string in self.stop), default=0)


def overlap(text: str, string: str) -> int:
    """With how many of the string's first characters the text ends, but not with all of them."""
    size = min(len(string) - 1, len(text))
    while size > 0:
        size = string.rfind(text[-1], 0, size) + 1  # it can only end where this character is
        if text.endswith(string[:size]):
            break
        size -= 1
    return size
