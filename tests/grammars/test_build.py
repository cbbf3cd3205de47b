"""The automaton over tokens is the automaton over bytes, read token by token."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest

from jaxspec.api.grammars import grammar_vocabulary
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.grammars import build, machine
from jaxspec.grammars.automaton import FORBIDDEN, START, Automaton, with_optional_reasoning, with_reasoning
from jaxspec.grammars.vocabulary import Vocabulary
from tests.grammars.walks import distances, form, texts, tokens
from tests.support.vocabularies import ids_of, tokenizer_of

FORMS = [
    form(choice=["true", "false", "the dog", "é"]),
    form(regex="(?:the |dog|\N{EURO SIGN}){1,3}E?"),
    form(json={"type": "object", "properties": {"the": {"type": "string"}}, "required": ["the"]}),
    form(json_object=True, max_depth=1),
]


@pytest.mark.parametrize("grammar", FORMS, ids=lambda grammar: grammar.kind)
def test_each_token_leads_where_its_bytes_lead(grammar):
    """All tokens from all states: through the automaton over bytes, from the same text."""
    vocabulary = tokens()
    table, accepting = machine.compiled(grammar.node())
    found = build.automaton(grammar, vocabulary)
    assert len(found.classes) == vocabulary.size
    same = {START: 0}  # state over tokens -> state over bytes
    left = [START]
    for state in left:
        for i in range(vocabulary.size):
            token = vocabulary.tokens[i] if i < len(vocabulary.tokens) else None
            target = found.advance(state, [i])
            if i in vocabulary.end_ids:
                assert target == (found.end if accepting[same[state]] else FORBIDDEN)
                continue
            after = same[state]
            for byte in token or b"":
                after = int(table[after, byte]) if after >= 0 else after
            assert (target == FORBIDDEN) == (not token or after < 0), token
            if target != FORBIDDEN:
                assert same.setdefault(target, after) == after
                left += [target] if target not in left else []
    assert len(same) == len(table) == found.end


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback", "byte fallback, prefix"])
@pytest.mark.parametrize("grammar", FORMS, ids=lambda grammar: grammar.kind)
def test_the_tokenizers_own_text_of_the_ids_fits(kind, grammar):
    vocabulary, tokenizer = tokens(kind), tokenizer_of(kind)
    found = build.automaton(grammar, vocabulary)
    plain = build.automaton(grammar, tokens())
    known = {text: i for i, text in enumerate(tokens().tokens) if text and len(text) == 1}
    for text in texts(found, vocabulary, 10):
        ids = [i for byte in text.removeprefix(" " * vocabulary.strips).encode() for i in [known[bytes([byte])]]]
        assert plain.advance(START, [*ids, *tokens().end_ids]) == plain.end
    assert tokenizer.decode(ids_of(kind, "the", " dog")).endswith("the dog")


def test_a_space_that_the_tokenizer_removes_is_legal_at_the_start():
    """SentencePiece writes the first word with a space before it, which its text has not."""
    kind = "byte fallback, prefix"
    space, true = ids_of(kind, " true"), ids_of(kind, "true")
    either = build.automaton(form(json={"type": "boolean"}), tokens(kind))
    assert either.legal(START)[space]
    assert either.legal(START)[true]
    other = build.automaton(form(choice=["true"]), tokens(kind))
    assert other.advance(START, [*space, *tokens(kind).end_ids]) == other.end
    assert not other.legal(START)[true], "a text that begins with a space could not be told from one without"


@pytest.mark.parametrize("grammar", FORMS, ids=lambda grammar: grammar.kind)
def test_every_state_has_a_legal_token_and_a_way_to_the_end(grammar):
    """Also where the vocabulary lacks tokens for some bytes, so that some texts begin and cannot go on."""
    lacking = tuple(None if token in (b"\xa9", b"\x9f") else token for token in tokens().tokens)
    for vocabulary in (tokens(), dataclasses.replace(tokens(), tokens=lacking)):
        found = build.automaton(grammar, vocabulary)
        assert found.legal_counts().min() > 0
        assert max(distances(found)) < 1000
        assert found.legal_counts().tolist() == [int(found.legal(s).sum()) for s in range(len(found.next))]


def test_end_tokens_are_legal_only_at_an_end_and_lead_to_it():
    vocabulary = dataclasses.replace(tokens(), end_ids=(3, *tokens().end_ids))
    found = build.automaton(form(choice=["E"]), vocabulary)
    (end,) = ids_of("byte-level", "E")
    assert np.flatnonzero(found.legal(START)).tolist() == [i for i, t in enumerate(vocabulary.tokens) if t == b"E"]
    for state in (found.advance(START, [end]), found.end):
        assert tuple(np.flatnonzero(found.legal(state))) == vocabulary.end_ids
    assert found.advance(found.end, [3, 3]) == found.end
    assert found.advance(START, [end, end]) == FORBIDDEN
    assert found.advance(FORBIDDEN, [end]) == FORBIDDEN
    assert found.advance(START, [-1]) == FORBIDDEN
    assert found.advance(START, [10**6]) == FORBIDDEN


def test_special_tokens_and_ids_beyond_the_tokenizer_are_never_legal():
    vocabulary = tokens()
    found = build.automaton(form(regex="(?s).*".replace("(?s)", "") + "(?:.|\n)*"), vocabulary)
    never = np.all(found.next[:-1] == FORBIDDEN, axis=0)[found.classes]
    (special,) = ids_of("byte-level", "<s>")
    assert never[special]
    assert never[-3:].all(), "the model has more ids than the tokenizer"
    assert not never[: vocabulary.tokens.index(b"a") + 1][-1]


def test_a_grammar_without_a_text_is_refused():
    for grammar, vocabulary in [
        (form(regex="[^\x00-\U0010ffff]"), tokens()),
        (form(choice=["é"]), Vocabulary((b"a", b"b", None), (2,), 3)),
    ]:
        with pytest.raises(UserError, match="no text of the tokenizer's tokens fits the grammar: relax it"):
            build.automaton(grammar, vocabulary)


def test_a_large_table_is_refused(monkeypatch):
    monkeypatch.setattr(build, "MAX_ENTRIES", 1000)
    with pytest.raises(UserError, match="more than 1000 entries in its table"):
        build.automaton(FORMS[2], tokens())


def test_the_digest_tells_what_differs():
    vocabularies = [tokens(), dataclasses.replace(tokens(), end_ids=(3,)), dataclasses.replace(tokens(), size=500)]
    forms = [*FORMS, form(json_object=True, max_depth=2), form(json_object=True, max_depth=1, after="</think>")]
    digests = {build.digest(*pair) for pair in itertools.product(forms, vocabularies)}
    assert len(digests) == len(forms) * len(vocabularies)
    again = form(json={"type": "object", "properties": {"the": {"type": "string"}}, "required": ["the"]})
    assert build.digest(again, tokens()) == build.digest(FORMS[2], tokens())
    spelling = dataclasses.replace(again, spelled=("<x>",))
    marked = [dataclasses.replace(tokens(), marks={**tokens().marks, "<x>": i}) for i in (3, 4)]
    assert len({build.digest(spelling, vocabulary) for vocabulary in marked}) == 2


def test_reasoning_comes_before_the_grammar():
    vocabulary = tokens()
    (mark,) = ids_of("byte-level", "<think>")
    plain = build.automaton(form(choice=["E"]), vocabulary)
    found = with_reasoning(plain, mark)
    free = [i for i in range(vocabulary.size) if i not in vocabulary.end_ids]
    assert np.flatnonzero(found.legal(START)).tolist() == free, "an end would leave out the grammar"
    (end,), (dog,) = ids_of("byte-level", "E"), ids_of("byte-level", "dog")
    assert found.advance(START, [dog, end, dog]) == START
    assert found.advance(START, [dog, mark, end, *vocabulary.end_ids]) == found.end
    assert found.advance(START, [mark, dog]) == FORBIDDEN
    assert found.advance(START, [mark, mark]) == FORBIDDEN
    assert found.digest != plain.digest
    by_name = build.automaton(form(choice=["E"], after="<think>"), vocabulary)
    assert np.array_equal(by_name.next, found.next)
    assert np.array_equal(by_name.classes, found.classes)
    for after in ("</x>", "<|end|>"):
        with pytest.raises(
            UserError, match=f"after='{re.escape(after)}' is not a token .* name one, such as '<s>', '<think>'"
        ):
            build.automaton(form(choice=["E"], after=after), vocabulary)


def test_reasoning_may_come_before_the_grammar():
    """The first token decides: an opening mark, or the grammar's own beginning."""
    vocabulary = tokens()
    opening, mark = ids_of("byte-level", "<think>", "<s>")
    plain = build.automaton(form(choice=["E"]), vocabulary)
    found = with_optional_reasoning(plain, opening, mark)
    (end,), (dog,) = ids_of("byte-level", "E"), ids_of("byte-level", "dog")
    assert np.flatnonzero(found.legal(START)).tolist() == sorted([*np.flatnonzero(plain.legal(START)), opening])
    assert found.advance(START, [end, *vocabulary.end_ids]) == found.end
    assert found.advance(START, [opening, dog, opening, end, mark, end, *vocabulary.end_ids]) == found.end
    assert found.advance(START, [opening, *vocabulary.end_ids]) == FORBIDDEN
    assert found.advance(START, [opening, mark, opening]) == FORBIDDEN
    assert len({found.digest, plain.digest, with_reasoning(plain, mark).digest}) == 3
    asked = dataclasses.replace(form(choice=["E"], after="<s>"), opening="<think>")
    by_name = build.automaton(asked, vocabulary)
    assert np.array_equal(by_name.next, found.next)
    assert np.array_equal(by_name.classes, found.classes)


@pytest.mark.parametrize("kind", ["word pieces", "metaspace", "words"])
def test_a_tokenizer_whose_text_is_not_its_bytes_is_refused(kind):
    with pytest.raises(UnsupportedError, match="need a tokenizer of byte-level BPE"):
        grammar_vocabulary(tokenizer_of(kind), [1], 40)


def test_a_model_without_an_end_is_refused():
    with pytest.raises(UserError, match="need a model with an end token"):
        grammar_vocabulary(tokenizer_of("byte-level"), [], 40)


def test_an_automaton_is_small():
    found = build.automaton(FORMS[2], tokens())
    assert isinstance(found, Automaton)
    assert found.classes.dtype == np.uint16
    assert found.next.dtype == np.int32
    assert found.nbytes == found.classes.nbytes + found.next.nbytes
    assert len(np.unique(found.next, axis=1).T) == found.next.shape[1], "no two classes are alike"
