"""Token ids -> text as it grows: characters split over tokens, stop strings split over tokens, hidden end ids."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.api.detokenizer import Detokenizer, overlap
from tests.api.test_tokens import BYTES, drawn
from tests.support.vocabularies import KINDS, SPECIAL, Counting, ids_of, text_of, tokenizer_of

END = 256


class Bytes:
    """Id = byte; 256 is a special token."""

    def decode(self, ids, skip_special_tokens):
        pieces = [b"<end>" if i == END else bytes([i]) for i in ids if not (skip_special_tokens and i == END)]
        return b"".join(pieces).decode("utf-8", errors="replace")


class Words:
    """Word i, with a space in front unless it comes first: what a piece reads depends on what stands before it."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(f"w{i}" for i in ids)


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """ids up to each cut, then all."""
    return [ids[:c] for c in sorted(c % (len(ids) + 1) for c in cuts)] + [ids]


encoded = st.text(max_size=20).map(lambda text: list(text.encode()))
any_bytes = st.lists(st.integers(0, 255), max_size=24)
cuts = st.lists(st.integers(0, 1000), max_size=6)


@given(encoded, cuts)
def test_pieces_join_to_the_text_and_never_show_half_a_character(ids, at):
    detokenizer = Detokenizer(Bytes())
    whole = bytes(ids).decode()
    for part in cut(ids, at):
        detokenizer.feed(part)
        assert whole.startswith(detokenizer.text)
    assert detokenizer.finish(ids, include_stop=False) == whole


@given(any_bytes, cuts)
def test_invalid_bytes_end_up_as_the_tokenizer_reads_them(ids, at):
    detokenizer = Detokenizer(Bytes())
    for part in cut(ids, at):
        detokenizer.feed(part)
    final = detokenizer.finish(ids, include_stop=False)
    assert final.replace("\ufffd", "") == Bytes().decode(ids, True).replace("\ufffd", "")


@given(st.lists(st.integers(0, 30), max_size=12), cuts)
def test_spaces_between_words_survive_the_window(ids, at):
    detokenizer = Detokenizer(Words())
    for part in cut(ids, at):
        detokenizer.feed(part)
    assert detokenizer.finish(ids, include_stop=False) == Words().decode(ids, True)


@given(encoded, st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), min_size=1, max_size=3), cuts, st.booleans())
def test_stop_strings_cut_text_and_ids(ids, stops, at, include):
    """Fed in any pieces: the first stop string to be complete ends the text, and nothing after it is kept or shown."""
    ids = ids + list("ab é ba".encode())
    whole = bytes(ids).decode()
    detokenizer = Detokenizer(Bytes(), stop=tuple(stops))
    known, keep, shown = 0, None, ""
    for part in cut(ids, at):
        keep = detokenizer.find_stop(part, known)
        if keep is not None:
            break
        shown = detokenizer.text[: detokenizer.settled()]
        known = len(part)
    ends = {stop: whole.index(stop) + len(stop) for stop in stops if stop in whole}
    if not ends:
        assert keep is None
        assert detokenizer.finish(ids, include_stop=include) == whole
        return
    first = min(ends.values())
    assert keep == len(whole[:first].encode())
    assert ends[detokenizer.stop_string] == first
    text = detokenizer.finish(ids[:keep], include_stop=include)
    assert text == whole[: first - (0 if include else len(detokenizer.stop_string))]
    assert text.startswith(shown)


def test_what_may_be_the_beginning_of_a_stop_string_is_held_back():
    detokenizer = Detokenizer(Bytes(), stop=("END", "NOW"))
    assert detokenizer.find_stop(list(b"the E"), 0) is None
    assert detokenizer.settled() == 4
    assert detokenizer.find_stop(list(b"the EN"), 5) is None
    assert detokenizer.settled() == 4
    assert detokenizer.find_stop(list(b"the ENE"), 6) is None
    assert detokenizer.settled() == 6
    assert detokenizer.find_stop(list(b"the ENENDx"), 7) == 9
    assert detokenizer.finish(list(b"the ENEND"), include_stop=False) == "the EN"


@given(encoded, st.integers(0, 40), cuts)
def test_stop_strings_count_only_after_min_tokens(ids, least, at):
    """Of all occurrences, the first one whose last byte comes after the first `least` ids ends the text."""
    ids = list(b"abab") + ids + list(b"ab")
    detokenizer = Detokenizer(Bytes(), stop=("ab",), min_tokens=least)
    known, keep = 0, None
    for part in cut(ids, at):
        keep = detokenizer.find_stop(part, known)
        if keep is not None:
            break
        known = len(part)
    ends = [end for end in range(2, len(ids) + 1) if bytes(ids[end - 2 : end]) == b"ab" and end > least]
    assert keep == (ends[0] if ends else None)


def test_hidden_and_special_ids():
    ids = [*b"ab", END]
    assert Detokenizer(Bytes()).finish(ids, include_stop=False) == "ab"
    shown = Detokenizer(Bytes(), skip_special_tokens=False)
    assert shown.finish(ids, include_stop=False) == "ab<end>"
    hidden = Detokenizer(Bytes(), skip_special_tokens=False)
    hidden.hidden = frozenset({END})
    assert hidden.finish(ids, include_stop=False) == "ab"


def test_an_unfinished_character_at_the_end_is_not_lost():
    ids = list("né".encode())[:-1]
    detokenizer = Detokenizer(Bytes())
    detokenizer.feed(ids)
    assert detokenizer.text in ("n", "")
    assert detokenizer.finish(ids, include_stop=False) == "n\ufffd"


def test_a_stop_string_whose_token_begins_another_character_is_found():
    """And cut, also where the output ends there."""

    class Pieces:
        def decode(self, ids, skip_special_tokens):
            return b"".join([b"so ", b"it", b" END\xe2", b"\x82\xac"][i] for i in ids).decode("utf-8", errors="replace")

    ids = [0, 1, 2, 3]
    detokenizer = Detokenizer(Pieces(), stop=("END",))
    assert detokenizer.find_stop(ids[:2], 0) is None
    assert detokenizer.find_stop(ids[:3], 2) == 3
    assert detokenizer.finish(ids[:3], include_stop=False) == "so it "
    assert detokenizer.finish(ids[:3], include_stop=True) == "so it END"
    late = Detokenizer(Pieces(), stop=("END",), min_tokens=3)
    assert late.find_stop(ids, 0) is None, "it was complete with the third token"
    assert late.finish(ids, include_stop=False) == "so it END€"


@given(encoded, cuts)
def test_ids_that_were_read_before_an_interrupt_are_read_again(ids, at):
    """find_stop is asked anew from where the ids were kept; the text is as if it had been asked once."""
    detokenizer = Detokenizer(Bytes(), stop=("\0",))
    ids = [i for i in ids if i]
    kept = 0
    for part in cut(ids, at):
        if len(part) % 2:
            assert detokenizer.find_stop(part, kept) is None
            kept = len(part)
        else:  # these were not kept, and others came in their place
            detokenizer.find_stop([*part[:kept], *"é lost".encode()], kept)
    assert detokenizer.find_stop(ids, kept) is None
    assert detokenizer.finish(ids, include_stop=False) == bytes(ids).decode()


def test_how_much_of_a_stop_string_a_text_ends_with():
    rng = random.Random(0)
    for _ in range(3000):
        text, string = ("".join(rng.choices("ab", k=rng.randrange(least, 8))) for least in (0, 1))
        sizes = [n for n in range(len(string)) if text.endswith(string[:n])]
        assert overlap(text, string) == max(sizes, default=0), (text, string)


def test_an_interrupt_after_an_id_was_fed():
    """The launch is made again, and may say something else: nothing is left of what it said first."""
    for line in ("read", "feed", "end"):
        detokenizer = Detokenizer(Bytes(), stop=("ab",))
        if line == "end":  # it was found, and nobody heard of it
            assert detokenizer.find_stop(list(b"xab"), 0) == 3
        else:
            owner = detokenizer.reader if line == "read" else detokenizer
            real = getattr(owner, line)

            def interrupted(*ids, owner=owner, line=line, real=real):
                real(*ids)
                setattr(owner, line, real)
                raise KeyboardInterrupt

            setattr(owner, line, interrupted)
            with pytest.raises(KeyboardInterrupt):
                detokenizer.find_stop(list(b"\xe2y"), 0)
        assert detokenizer.find_stop(list(b"xab"), 0) == 3
        assert detokenizer.finish(list(b"xab"), include_stop=False) == "x"
        assert detokenizer.find_stop(list(b"zcd"), 0) is None
        assert detokenizer.finish(list(b"zcd"), include_stop=False) == "zcd"


@pytest.mark.parametrize("kind", KINDS)
@given(st.data(), cuts, st.booleans())
def test_a_stream_is_the_tokenizers_own_text(kind, data, at, skip):
    """With special tokens or without, and shown text never changes."""
    tokenizer, ids = tokenizer_of(kind), data.draw(drawn(kind))
    detokenizer, shown = Detokenizer(tokenizer, skip_special_tokens=skip), ""
    for part in cut(ids, at):
        detokenizer.feed(part)
        assert detokenizer.text.startswith(shown)
        shown = detokenizer.text
    text = detokenizer.finish(ids, include_stop=False)
    assert text.startswith(shown)
    assert text == text_of(kind, ids, skip=skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(st.data(), st.sampled_from(["true", "é", "€", "E", " t", "gs"]))
def test_the_first_id_that_completes_a_stop_string_ends_the_text(kind, data, stop):
    ids, until = data.draw(drawn(kind)), lambda end: text_of(kind, ids[:end], skip=True)
    detokenizer = Detokenizer(tokenizer_of(kind), stop=(stop,))
    keep = next((end for end in range(1, len(ids) + 1) if stop in until(end)), None)
    assert detokenizer.find_stop(ids, 0) == keep
    text = until(keep)
    assert detokenizer.finish(ids[:keep], include_stop=False) == (text if keep is None else text[: text.index(stop)])


@pytest.mark.parametrize("kind", KINDS)
@given(st.data(), cuts)
def test_what_tokens_add_joins_to_the_text(kind, data, at):
    """And their bytes to its bytes, where these are characters. A part of a stream never changes."""
    tokenizer, ids = tokenizer_of(kind), data.draw(drawn(kind))
    detokenizer, tokens = Detokenizer(tokenizer, placed=True), []
    last = max((at for at, i in enumerate(ids) if i not in ids_of(kind, *SPECIAL)), default=0)
    for part in [*(part for part in cut(ids, at) if len(part) <= last), ids]:  # the last of the text ends it
        detokenizer.feed(part)
        tokens += detokenizer.tokens(part, len(tokens), ended=part is ids)
    text = detokenizer.finish(ids, include_stop=False)
    assert "".join(token.text for token in tokens if token.data is not None) == text
    left_out = [i for i, token in zip(ids, tokens, strict=True) if token.data is None]
    assert left_out == [i for i in ids if i in ids_of(kind, *SPECIAL)]
    if "\ufffd" not in text or kind == "byte-level":
        assert b"".join(token.data or b"" for token in tokens).decode(errors="replace") == text


@pytest.mark.parametrize(
    "pieces", [[b"\x80"], [b"\xe2"], [b"\x80", b"\xe2"], [b"\xc3", b"\xa9"], ["\ufffd"], ["<s>"], ["true"]]
)
@pytest.mark.parametrize("kind", [*BYTES, "slow"])
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_the_cost_of_a_token_does_not_grow(kind, pieces, stop):
    """Whatever comes a thousand times: a tokenizer decodes a few ids for each, and no id is read again."""
    known = BYTES[0] if kind == "slow" else kind
    tokenizer, ids = Counting(tokenizer_of(known), hides=kind == "slow"), ids_of(known, *pieces) * 1000
    detokenizer, read = Detokenizer(tokenizer, stop=stop), []
    before = tokenizer.count
    real = detokenizer.reader.read
    detokenizer.reader.read = lambda ids: read.extend(ids) or real(ids)
    for end in range(1, len(ids) + 1):
        if stop:
            assert detokenizer.find_stop(ids[:end], end - 1) is None
        else:
            detokenizer.feed(ids[:end])
    text = detokenizer.finish(ids, include_stop=False)
    assert text == text_of(known, ids, skip=True)
    assert tokenizer.count - before <= (20 * len(ids) if kind == "slow" else 0)
    assert read == (ids if pieces != ["<s>"] else [])
    if pieces != ["<s>"]:
        assert len(detokenizer.text) >= len(text) - 3, "it is shown before the end"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("include", [False, True])
def test_a_special_token_that_the_text_hides_can_be_a_stop_string(kind, include):
    tokenizer, before = tokenizer_of(kind), ids_of(kind, *([b"t", b"r", b"\xe2"] if kind in BYTES else ["true"]))
    end, other = ids_of(kind, *reversed(SPECIAL))
    ids, text = [*before, other, end, *before], text_of(kind, before)
    for skip, shown in ((True, text), (False, text_of(kind, [*before, other]))):
        detokenizer = Detokenizer(tokenizer, stop=("never", "<|end|>"), skip_special_tokens=skip)
        assert detokenizer.find_stop(ids[:2], 0) is None
        assert detokenizer.find_stop(ids, 2) == len(before) + 2
        cut = detokenizer.finish(ids[: len(before) + 2], include_stop=include)
        assert cut.replace(" ", "") == shown.replace(" ", "") + "<|end|>" * include
        assert detokenizer.stop_string == "<|end|>"
    late = Detokenizer(tokenizer, stop=("<|end|>",), min_tokens=len(before) + 2)
    assert late.find_stop(ids, 0) is None


@pytest.mark.parametrize("kind", [*BYTES, "slow"])
@pytest.mark.parametrize("include", [False, True])
def test_the_end_of_the_output_can_complete_a_stop_string(kind, include):
    """A character that stays unfinished is U+FFFD, which may be one, or the end of one."""
    known = BYTES[0] if kind == "slow" else kind
    tokenizer = Counting(tokenizer_of(known), hides=kind == "slow")
    ids = ids_of(known, "dog", b"\xe2")
    for stop in ("\ufffd", "g\ufffd"):
        detokenizer = Detokenizer(tokenizer, stop=(stop,))
        assert detokenizer.find_stop(ids, 0) is None
        text = text_of(kind if kind in KINDS else BYTES[0], ids)
        expected = text[: text.index(stop)] + stop * include
        assert detokenizer.finish(ids, include_stop=include) == expected
        assert detokenizer.finish(ids, include_stop=include) == expected
        assert detokenizer.stop_string == stop
        assert Detokenizer(tokenizer, stop=(stop,), min_tokens=len(ids)).finish(ids, include_stop=False) == text
    special = [*ids, *ids_of(known, "<s>")]
    hidden = Detokenizer(tokenizer, stop=("\ufffd", "<s>"))
    assert hidden.find_stop(special, 0) == len(special)
    assert hidden.finish(special, include_stop=False) == "dog"
