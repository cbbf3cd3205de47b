"""Tokens as text: what each says by itself, and what they say one after the other."""

from __future__ import annotations

import codecs
import itertools
import json
import re
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

REPLACEMENT = "\ufffd"
EACH = "jaxspec.replace_each"  # how a codec treats wrong bytes: each of them is U+FFFD


def replace_each(error: Any) -> tuple[str, int]:
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH, replace_each)
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level BPE spells as themselves
OTHERS = [b for b in range(256) if b not in PRINTABLE]
ALPHABET = {chr(b): b for b in PRINTABLE} | {chr(256 + n): b for n, b in enumerate(OTHERS)}
PROBE = " a .\n  it's é€😀 "


class Token(NamedTuple):
    """A token as text.

    text: U+FFFD stands for bytes that are no character; None where the tokenizer fails.
    data: its bytes; None where it has no part in a text.
    is_byte: whether it is SentencePiece's token of one byte.
    """

    text: str | None
    data: bytes | None
    is_byte: bool = False


class Vocabulary(dict[int, Token]):
    """The tokens of a tokenizer, described one by one when they are first asked for: each as it reads after others.

    special: id -> text of the tokens that skip_special_tokens leaves out.
    reader: the class that joins tokens.
    strips: whether a text loses a space at its start.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = weakref.proxy(tokenizer)  # the key by which `vocabulary` finds this
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        steps = decoding_steps(self.backend)
        self.in_alphabet, self.has_byte_tokens = "ByteLevel" in steps, "ByteFallback" in steps
        self.strips = steps[-1:] == ("Strip",)
        self.special = special_tokens(tokenizer, self.backend)
        self.reader: type[Reader] = READERS.get(steps, Window)
        if self.reader is not Window:  # it may tidy up spaces, or decode in a way of its own
            ids, joined = tokenizer.encode(PROBE, add_special_tokens=False), self.reader(self, False)
            if joined.read(ids) + joined.rest() != tokenizer.decode(ids):
                self.reader = Window

    def __missing__(self, i: int) -> Token:
        try:
            token = self.describe(i)
        except Exception:  # as some tokenizers raise at ids of a padded table
            token = Token(None, None)
        self[i] = token
        return token

    def describe(self, i: int) -> Token:
        """Return the token of an id."""
        if self.backend is None:
            text = self.tokenizer.decode([i])
            return Token(text, text.encode())
        piece = self.backend.id_to_token(i)
        if piece is None:
            return Token("", b"")
        if self.in_alphabet:
            spelled = [ALPHABET.get(character) for character in piece]
            data = bytes(b for b in spelled if b is not None) if None not in spelled else piece.encode()
            return Token(data.decode(errors="replace"), data)
        if self.has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(piece)):
            data = bytes.fromhex(byte[1])
            return Token(data.decode(errors="replace"), data, is_byte=True)
        decoder = self.backend.decoder
        text = decoder.decode(["a", piece])[1:] if decoder else f" {piece}"
        return Token(text, text.encode())


def vocabulary(tokenizer: Any) -> Vocabulary:
    """Return the tokens of a tokenizer, of which there is one Vocabulary."""
    found = VOCABULARIES.get(tokenizer)
    if found is None:
        found = VOCABULARIES[tokenizer] = Vocabulary(tokenizer)
    return found


VOCABULARIES: weakref.WeakKeyDictionary[Any, Vocabulary] = weakref.WeakKeyDictionary()


def decoding_steps(backend: Any) -> tuple[str, ...]:
    """Return the kinds of steps by which a tokenizer of the tokenizers library joins pieces. Replacements at the
    beginning are left out, as they concern each piece by itself."""
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return ()
    described = json.loads(decoder.__getstate__())
    kinds = [step["type"] for step in described.get("decoders", [described])]
    return tuple(itertools.dropwhile(lambda kind: kind == "Replace", kinds))


def special_tokens(tokenizer: Any, backend: Any) -> dict[int, str]:
    if backend is not None:
        return {i: token.content for i, token in backend.get_added_tokens_decoder().items() if token.special}
    ids, texts = getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ())
    return dict(zip(ids, texts, strict=True))


class Reader:
    """Text of tokens that come one after the other: all that `read` returned, and then `rest`."""

    def __init__(self, known: Vocabulary, skip_special_tokens: bool) -> None:
        self.known = known

    def read(self, ids: Sequence[int]) -> str:
        """Return the text that these ids make certain."""
        raise AssertionError

    def rest(self) -> str:
        """Return how the text ends if no id follows."""
        raise AssertionError


class Utf8(Reader):
    """Byte-level BPE: the bytes of all tokens are one UTF-8 text."""

    def __init__(self, known: Vocabulary, skip_special_tokens: bool) -> None:
        self.known, self.utf8 = known, codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, ids: Sequence[int]) -> str:
        return decoded(self.utf8, b"".join([self.known[i].data or b"" for i in ids]))

    def rest(self) -> str:
        return self.utf8.getstate()[0].decode(errors="replace")


def decoded(utf8: codecs.IncrementalDecoder, data: bytes) -> str:
    """Return what is certain. The decoder waits for the third byte of a surrogate, which is never a character."""
    text = utf8.decode(data)
    return text + utf8.decode(b"", final=True) if SURROGATE.match(utf8.getstate()[0]) else text


class ByteRuns(Reader):
    """SentencePiece with byte tokens, whose bytes are UTF-8. Each character is certain once it is whole.

    Where a byte is wrong, the tokenizers library makes U+FFFD of all bytes around it, back to the last other token.
    Here the whole characters stay, as a stream has shown them.
    """

    def __init__(self, known: Vocabulary, skip_special_tokens: bool) -> None:
        self.known, self.utf8 = known, codecs.getincrementaldecoder("utf-8")(EACH)
        self.lost = " " if known.strips else ""  # at the start of the text

    def read(self, ids: Sequence[int]) -> str:
        text = "".join([self.add(self.known[i]) for i in ids])
        certain = text.removeprefix(self.lost)
        self.lost = "" if text else self.lost
        return certain

    def add(self, token: Token) -> str:
        if token.is_byte:
            return decoded(self.utf8, token.data or b"")
        # An id without a token ends no character.
        return self.utf8.decode(b"", final=True) + token.text if token.text else ""

    def rest(self) -> str:
        return self.utf8.getstate()[0].decode(errors=EACH)


class Window(Reader):
    """Any other tokenizer: the last few ids are decoded again with each new one. Up to three U+FFFD at the end wait,
    because a character has at most four bytes."""

    span = 8  # ids

    def __init__(self, known: Vocabulary, skip_special_tokens: bool) -> None:
        self.known, self.skip_special_tokens = known, skip_special_tokens
        self.ids: list[int] = []
        self.text, self.certain = "", 0  # of these ids; how many of its characters were returned

    def decode(self, ids: Sequence[int]) -> str:
        return self.known.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)

    def read(self, ids: Sequence[int]) -> str:
        if self.known.backend is not None:  # an id without a token is no context
            ids = [i for i in ids if self.known[i].text]
        return "".join([self.add(ids[at : at + self.span]) for at in range(0, len(ids), self.span)])

    def add(self, ids: Sequence[int]) -> str:
        text = self.decode([*self.ids, *ids])
        unfinished = min(3, len(text) - len(text.rstrip(REPLACEMENT)))
        if self.ids and text == self.text and not unfinished:  # these ids say nothing, and are no context
            return ""
        new = text[self.certain : len(text) - unfinished]
        self.ids, self.text, self.certain = [*self.ids, *ids], text, self.certain + len(new)
        if len(self.ids) > 2 * self.span:
            self.shorten()
        return new

    def shorten(self) -> None:
        """Keep the last ids alone, where some text before the unfinished one is among theirs."""
        ids = self.ids[-self.span :]
        text = self.decode(ids)
        certain = self.certain - (len(self.text) - len(text))
        if certain > 0:
            self.ids, self.text, self.certain = ids, text, certain

    def rest(self) -> str:
        return self.text[self.certain :]


# Decoding steps -> how tokens are joined.
READERS: dict[tuple[str, ...], type[Reader]] = {
    ("ByteLevel",): Utf8,
    ("ByteFallback", "Fuse"): ByteRuns,
    ("ByteFallback", "Fuse", "Strip"): ByteRuns,
}
