"""Small tokenizers of each kind: how they join tokens is what differs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxspec.api.tokens import ALPHABET, EACH

SPECIAL = ["<s>", "<|end|>"]
WORDS = ["true", "false", "the", "dog", ".", "END", "E"]
SPELLED = {byte: character for character, byte in ALPHABET.items()}
# Of several bytes; some begin or end within a character.
LUMPS = [*(f"{space}{word}".encode() for word in WORDS if len(word) > 1 for space in ("", " ")), "é".encode()]
LUMPS += [b" \xe2\x82", b"\xac a", b"\x80\xe2", "\ufffd".encode()]
SPACE = "▁"


def byte_level() -> Tokenizer:
    pieces = [SPELLED[b] for b in range(256)] + ["".join(SPELLED[b] for b in lump) for lump in LUMPS]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback(*, prefix: bool) -> Tokenizer:
    """SentencePiece, which puts a space in front of a text where `prefix`."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), SPACE, *"abé.", *WORDS, *(SPACE + w for w in WORDS)]
    vocab = {piece: i for i, piece in enumerate([*dict.fromkeys(pieces), "\ufffd"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    spell = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spell]) if prefix else spell
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def word_pieces() -> Tokenizer:
    pieces = ["[UNK]", *WORDS, "##s", "##\ufffd", "\ufffd", *(f"##{w}" for w in WORDS)]
    tokenizer = Tokenizer(models.WordPiece(vocab={piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = ["<unk>", SPACE, SPACE * 2, "\ufffd", *WORDS, *(SPACE + w for w in WORDS)]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def words() -> Tokenizer:
    """Without a decoder: spaces join the pieces."""
    return Tokenizer(models.WordLevel(vocab={word: i for i, word in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]"))


KINDS = {
    "byte-level": byte_level,
    "byte fallback": functools.partial(byte_fallback, prefix=False),
    "byte fallback, prefix": functools.partial(byte_fallback, prefix=True),
    "word pieces": word_pieces,
    "metaspace": metaspace,
    "words": words,
}


@functools.cache
def tokenizer_of(kind: str) -> Any:
    """A tokenizer as transformers has it, with special tokens and <think>, which is added and not special."""
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens(["<think>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", clean_up_tokenization_spaces=False)


def ids_of(kind: str, *pieces: str | bytes) -> list[int]:
    """The ids of pieces: text of one token, or bytes, which in SentencePiece are as many byte tokens."""
    known = tokenizer_of(kind).get_vocab()
    spelled = lambda data: "".join(SPELLED[b] for b in data)
    found: list[int] = []
    for piece in pieces:
        if isinstance(piece, bytes) and kind != "byte-level":
            found += [known[f"<0x{b:02X}>"] for b in piece]
        elif isinstance(piece, bytes):
            found.append(known[spelled(piece)])
        else:
            options = (piece, spelled(piece.encode()), piece.replace(" ", SPACE))
            found.append(known[next(option for option in options if option in known)])
    return found


def text_of(kind: str, ids: Sequence[int], *, skip: bool = False) -> str:
    """Return the tokenizer's own text of ids, but with the whole characters of SentencePiece's bytes of which one is
    wrong: that one stands there as U+FFFD, spelled in bytes."""
    if kind.startswith("byte fallback"):
        first, *_, last = ids_of(kind, bytes(range(256)))
        hidden = ids_of(kind, *SPECIAL) if skip else []
        ids = [i for i in ids if i < len(tokenizer_of(kind)) and i not in hidden]
        runs = [list(run) for _, run in itertools.groupby(ids, lambda i: first <= i <= last)]
        spelled = lambda run: bytes(i - first for i in run).decode(errors=EACH).encode()
        ids = [i for run in runs for i in (ids_of(kind, spelled(run)) if first <= run[0] <= last else run)]
    return tokenizer_of(kind).decode(ids, skip_special_tokens=skip)


class Counting:
    """The same tokenizer; counts the ids that it decodes. hides: that the tokenizers library is in it is not seen."""

    def __init__(self, tokenizer: Any, *, hides: bool = False) -> None:
        self.tokenizer, self.hides, self.count = tokenizer, hides, 0

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        self.count += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def __getattr__(self, name: str) -> Any:
        if name == "backend_tokenizer" and self.hides:
            raise AttributeError(name)
        return getattr(self.tokenizer, name)


class Failing(Counting):
    """A tokenizer that can only decode, and fails at some ids."""

    def __init__(self, tokenizer: Any, at: Callable[[list[int]], bool]) -> None:
        super().__init__(tokenizer, hides=True)
        self.at = at

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        if self.at(ids):
            raise IndexError("piece id is out of range")
        return super().decode(ids, skip_special_tokens)
