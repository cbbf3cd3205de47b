"""Conversion of tokens to text: the text of each token by itself, and the text of a sequence of tokens."""

from __future__ import annotations

import codecs
import itertools
import json
import re
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

REPLACEMENT = "\ufffd"
EACH = "jaxspec.replace_each"  # name of the codec error handler that replaces each wrong byte by U+FFFD


def replace_each(error: Any) -> tuple[str, int]:
    """Replace each byte that cannot be decoded by U+FFFD. Python's codecs call this function with their error."""
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH, replace_each)
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
# Bytes that byte-level BPE writes as the Unicode character of the same number.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
ALPHABET = {chr(b): b for b in PRINTABLE} | {chr(256 + n): b for n, b in enumerate(OTHERS)}
PROBE = " a .\n  it's é€😀 "


class Token(NamedTuple):
    """The text and the bytes of a token.

    text: text of the token, with U+FFFD for bytes that are not a character; None if the tokenizer cannot decode it.
    data: bytes of the token; None for a token that is left out of the text or cannot be decoded.
    is_byte: whether this is one of SentencePiece's tokens for a single byte, such as <0x0A>.
    """

    text: str | None
    data: bytes | None
    is_byte: bool = False


class Vocabulary(dict[int, Token]):
    """A dict from each id of a tokenizer to its Token, as the id reads after other ids. Entries are made on demand.

    special: texts of the tokens that skip_special_tokens leaves out, by id.
    reader: subclass of Reader that decodes sequences of this tokenizer's ids.
    strips: whether the tokenizer removes a space at the start of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        # The reference is weak, because VOCABULARIES keeps this object only as long as the tokenizer exists.
        self.tokenizer = weakref.proxy(tokenizer)
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        steps = decoding_steps(self.backend)
        self.in_alphabet = "ByteLevel" in steps
        self.has_byte_tokens = "ByteFallback" in steps
        self.strips = steps[-1:] == ("Strip",)
        self.special = special_tokens(tokenizer, self.backend)
        self.reader: type[Reader] = READERS.get(steps, Window)
        # The reader is tested with the text PROBE: the tokenizer may tidy up spaces, or decode in its own way.
        if self.reader is not Window:
            ids = tokenizer.encode(PROBE, add_special_tokens=False)
            joined = self.reader(self, False)
            if joined.read(ids) + joined.rest() != tokenizer.decode(ids):
                self.reader = Window

    def __missing__(self, i: int) -> Token:
        try:
            token = self.describe(i)
        except Exception:  # some tokenizers raise for ids beyond their vocabulary, which a padded embedding table has
            token = Token(None, None)
        self[i] = token
        return token

    def describe(self, i: int) -> Token:
        """Return the Token of an id."""
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
        byte = BYTE_TOKEN.fullmatch(piece) if self.has_byte_tokens else None
        if byte is not None:
            data = bytes.fromhex(byte[1])
            return Token(data.decode(errors="replace"), data, is_byte=True)
        decoder = self.backend.decoder
        text = decoder.decode(["a", piece])[1:] if decoder else f" {piece}"
        return Token(text, text.encode())


def vocabulary(tokenizer: Any) -> Vocabulary:
    """Return the Vocabulary of a tokenizer, made at the first call and the same object at later ones."""
    found = VOCABULARIES.get(tokenizer)
    if found is None:
        found = VOCABULARIES[tokenizer] = Vocabulary(tokenizer)
    return found


VOCABULARIES: weakref.WeakKeyDictionary[Any, Vocabulary] = weakref.WeakKeyDictionary()


def decoding_steps(backend: Any) -> tuple[str, ...]:
    """Return the names of the steps with which the tokenizers library joins the texts of tokens, in order.

    "Replace" steps at the beginning are left out, because they change each token's text by itself.

    backend: object of the tokenizers library, or None for a tokenizer without one.
    """
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return ()
    described = json.loads(decoder.__getstate__())
    kinds = [step["type"] for step in described.get("decoders", [described])]
    return tuple(itertools.dropwhile(lambda kind: kind == "Replace", kinds))


def special_tokens(tokenizer: Any, backend: Any) -> dict[int, str]:
    """Return the texts of the tokenizer's special tokens, by id."""
    if backend is not None:
        return {i: token.content for i, token in backend.get_added_tokens_decoder().items() if token.special}
    ids = getattr(tokenizer, "all_special_ids", ())
    texts = getattr(tokenizer, "all_special_tokens", ())
    return dict(zip(ids, texts, strict=True))


class Reader:
    """An incremental decoder of token ids. The whole text is all that `read` returned, followed by `rest`."""

    def __init__(self, known: Vocabulary, skip_special_tokens: bool) -> None:
        self.known = known

    def read(self, ids: Sequence[int]) -> str:
        """Return the new text that is certain, whatever follows, once these ids are added."""
        raise AssertionError

    def rest(self) -> str:
        """Return the end of the text if no further id follows."""
        raise AssertionError


class Utf8(Reader):
    """The reader for byte-level BPE, where the bytes of all tokens together are UTF-8."""

    def __init__(self, known: Vocabulary, skip_special_tokens: bool) -> None:
        self.known = known
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, ids: Sequence[int]) -> str:
        return decoded(self.utf8, b"".join([self.known[i].data or b"" for i in ids]))

    def rest(self) -> str:
        return self.utf8.getstate()[0].decode(errors="replace")


def decoded(utf8: codecs.IncrementalDecoder, data: bytes) -> str:
    """Feed bytes to an incremental UTF-8 decoder, and return the new text that is certain.

    The decoder alone would wait for the third byte of a surrogate, which is never a character.
    """
    text = utf8.decode(data)
    return text + utf8.decode(b"", final=True) if SURROGATE.match(utf8.getstate()[0]) else text


class ByteRuns(Reader):
    """The reader for SentencePiece with byte tokens: successive byte tokens are UTF-8.

    A character is certain once it is complete. If a byte is wrong, the tokenizers library replaces all bytes of its
    run of byte tokens by U+FFFD. This reader keeps the complete characters, because a stream has shown them already.
    """

    def __init__(self, known: Vocabulary, skip_special_tokens: bool) -> None:
        self.known = known
        self.utf8 = codecs.getincrementaldecoder("utf-8")(EACH)
        self.lost = " " if known.strips else ""  # space at the start of the text that is still to be removed

    def read(self, ids: Sequence[int]) -> str:
        text = "".join([self.add(self.known[i]) for i in ids])
        certain = text.removeprefix(self.lost)
        self.lost = "" if text else self.lost
        return certain

    def add(self, token: Token) -> str:
        """Return the new text that is certain once this token is added."""
        if token.is_byte:
            return decoded(self.utf8, token.data or b"")
        # A token without text does not end a run of byte tokens.
        return self.utf8.decode(b"", final=True) + token.text if token.text else ""

    def rest(self) -> str:
        return self.utf8.getstate()[0].decode(errors=EACH)


class Window(Reader):
    """The reader for any other tokenizer. It decodes the last few ids again with each new id.

    Up to three U+FFFD at the end of the text are held back, because they may be part of a character of four bytes.
    """

    span = 8  # number of last ids that `shorten` keeps; largest number of new ids that are decoded at once

    def __init__(self, known: Vocabulary, skip_special_tokens: bool) -> None:
        self.known = known
        self.skip_special_tokens = skip_special_tokens
        self.ids: list[int] = []
        self.text = ""  # text of `self.ids`
        self.certain = 0  # number of characters of `self.text` that were returned

    def decode(self, ids: Sequence[int]) -> str:
        """Return the tokenizer's text of these ids."""
        text: str = self.known.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)
        return text

    def read(self, ids: Sequence[int]) -> str:
        if self.known.backend is not None:  # ids without text are dropped: the text of later ids does not need them
            ids = [i for i in ids if self.known[i].text]
        return "".join([self.add(ids[at : at + self.span]) for at in range(0, len(ids), self.span)])

    def add(self, ids: Sequence[int]) -> str:
        """Return the new text that is certain once these ids are added."""
        text = self.decode([*self.ids, *ids])
        unfinished = min(3, len(text) - len(text.rstrip(REPLACEMENT)))
        if self.ids and text == self.text and not unfinished:  # the new ids have no text: they are dropped
            return ""
        new = text[self.certain : len(text) - unfinished]
        self.ids, self.text, self.certain = [*self.ids, *ids], text, self.certain + len(new)
        if len(self.ids) > 2 * self.span:
            self.shorten()
        return new

    def shorten(self) -> None:
        """Drop all but the last `span` ids, if the text of those includes all text that is not certain yet."""
        ids = self.ids[-self.span :]
        text = self.decode(ids)
        certain = self.certain - (len(self.text) - len(text))
        if certain > 0:
            self.ids, self.text, self.certain = ids, text, certain

    def rest(self) -> str:
        return self.text[self.certain :]


# Result of `decoding_steps` -> the reader for tokenizers with these steps. All other tokenizers use Window.
READERS: dict[tuple[str, ...], type[Reader]] = {
    ("ByteLevel",): Utf8,
    ("ByteFallback", "Fuse"): ByteRuns,
    ("ByteFallback", "Fuse", "Strip"): ByteRuns,
}
