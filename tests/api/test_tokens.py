"""Tokens as text, against the tokenizers' own decoding of all ids."""

from __future__ import annotations

import itertools
import os.path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from jaxspec.api.tokens import ByteRuns, Utf8, Window, vocabulary
from tests.support.vocabularies import KINDS, ids_of, text_of, tokenizer_of

BYTES = [kind for kind in KINDS if kind.startswith("byte")]
PARTS = [b"\xc3\xa9", b"\xe2\x82", b"\xac", b"\x80", b"\xe2", b" ", b"\xf0\x9f\x98\x80", b"\xed\xa0"]


def joined(parts: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def drawn(kind: str):
    """Any ids, some of no token, and often bytes: whole characters, parts of them, bytes of none."""
    tokenizer = tokenizer_of(kind)
    single = st.integers(0, len(tokenizer) + 3).map(lambda i: [i])
    if kind not in BYTES:
        return st.lists(single, max_size=40).map(joined)
    spelled = st.sampled_from(PARTS).map(lambda part: ids_of(kind, *(bytes([b]) for b in part)))
    return st.lists(st.one_of(single, spelled), max_size=24).map(joined)


def read(tokenizer, ids, cuts=()) -> str:
    """The text of ids that come in parts."""
    known = vocabulary(tokenizer)
    reader, text, start = known.reader(known, False), "", 0
    for end in [*sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]:
        text += reader.read(ids[start:end])
        start = end
    return text + reader.rest()


@pytest.mark.parametrize("kind", KINDS)
@given(st.data(), st.lists(st.integers(0, 1000), max_size=6))
def test_parts_join_to_the_tokenizers_own_text(kind, data, cuts):
    given_ids = data.draw(drawn(kind))
    assert read(tokenizer_of(kind), given_ids, cuts) == text_of(kind, given_ids)


def test_whole_characters_stay_where_a_byte_is_wrong():
    ids = ids_of("byte fallback", *(bytes([b]) for b in b"\xc3\xa9\xe2"), "dog")
    assert read(tokenizer_of("byte fallback"), ids) == "\u00e9\ufffddog"


@pytest.mark.parametrize("kind", KINDS)
def test_how_tokens_are_joined(kind):
    expected = {"byte-level": Utf8, "byte fallback": ByteRuns, "byte fallback, prefix": ByteRuns}
    assert vocabulary(tokenizer_of(kind)).reader is expected.get(kind, Window)


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked():
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args, **options):
            return super()._decode(*args, **options).upper()

    tokenizer = Shouting(tokenizer_object=tokenizer_of("byte-level").backend_tokenizer)
    assert read(tokenizer, ids_of("byte-level", "true", " dog")) == "TRUE DOG"


@pytest.mark.parametrize("kind", BYTES)
@given(st.data())
def test_text_is_shown_as_soon_as_no_byte_can_change_it(kind, data):
    """The shown text is what all continuations have in common."""
    begun, known = data.draw(drawn(kind)), vocabulary(tokenizer_of(kind))
    reader = known.reader(known, False)
    shown = "".join(reader.read([i]) for i in begun)
    bytes_of = lambda data: ids_of(kind, *(bytes([b]) for b in data))
    last_ones = [bytes([first]) + b"\x80" * n for first in (0x80, 0x90, 0xA0, 0xBF) for n in range(3)]
    further = [[], ids_of(kind, "dog"), *map(bytes_of, [b"a", b"\xe2a", *last_ones])]
    assert shown == os.path.commonprefix([text_of(kind, [*begun, *more]) for more in further])  # noqa: RUF071
