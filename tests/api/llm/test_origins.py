"""The origin of each token: it adds up to the counters of acceptance, to the text, and to what the grammar allows."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest

from jaxspec import SamplingParams
from tests.api.llm.answers import GREEDY, PROMPTS

ASKED = dataclasses.replace(GREEDY, token_origins=True)


def drafted(origins) -> tuple[int, int, Counter]:
    """Rounds with drafts, drafts that these proposed, and accepted ones by position: what the counters say."""
    rounds = {origin.round: origin.num_drafts for origin in origins if origin.num_drafts}
    return len(rounds), sum(rounds.values()), Counter(o.position for o in origins if o.origin == "draft")


def assert_adds_up(output, completion) -> None:
    origins, counters = completion.token_origins, output.metrics
    rounds, proposed, accepted = drafted(origins)
    assert (rounds, proposed) == (counters.num_drafts, counters.num_draft_tokens)
    assert [
        accepted[i] for i in range(len(counters.num_accepted_tokens_per_pos))
    ] == counters.num_accepted_tokens_per_pos
    assert len(origins) == len(completion.token_ids) == counters.num_emitted_tokens
    assert "".join(origin.text for origin in origins) == completion.text
    for before, after in itertools.pairwise(origins):
        assert (after.round, after.position) in [(before.round, before.position + 1), (before.round + 1, 0)]
        assert before.origin == "draft" or after.round > before.round, "the target's token ends its round"


@pytest.mark.parametrize("params", [ASKED, dataclasses.replace(ASKED, temperature=0.8, seed=3)])
def test_origins_add_up_to_the_counters(llm, params):
    outputs = llm.generate(PROMPTS[:3], params)
    for output in outputs:
        assert_adds_up(output, output.outputs[0])
    found = [origin for output in outputs for origin in output.outputs[0].token_origins]
    assert {origin.origin for origin in found} == {"draft", "target"}
    assert {(origin.origin, origin.method) for origin in found} == {("draft", "draft_model"), ("target", None)}


def test_a_stream_has_the_same_origins(llm):
    """Neighbours ask for none, and get none."""
    asked = [ASKED, dataclasses.replace(ASKED, token_origins=False)]
    expected = [output.outputs[0] for output in llm.generate(PROMPTS[:2], asked)]
    pieces = list(llm.stream(PROMPTS[:2], asked))
    assert expected[1].token_origins is None
    assert all(piece.token_origins is None for piece in pieces if piece.prompt_index == 1)
    found = [origin for piece in pieces if piece.prompt_index == 0 for origin in piece.token_origins]
    assert "".join(o.text for o in found) == expected[0].text
    counts = lambda origins: [(o.origin, o.position, o.num_drafts) for o in origins]
    assert len(counts(found)) == len(counts(expected[0].token_origins))


def test_without_drafts_each_round_is_one_token_of_the_target(llm):
    (completion,) = llm.generate(PROMPTS[0], dataclasses.replace(ASKED, num_speculative_tokens=0))[0].outputs
    found = [(o.origin, o.method, o.round, o.position, o.num_drafts) for o in completion.token_origins]
    assert found == [("target", None, i, 0, 0) for i in range(len(found))]


def test_what_a_stop_string_cuts_off_has_no_origin(llm):
    text = llm.generate(PROMPTS[1], ASKED)[0].outputs[0].text
    output = llm.generate(PROMPTS[1], dataclasses.replace(ASKED, stop=(text[9:12],)))[0]
    assert len(output.outputs[0].token_origins) == len(output.outputs[0].token_ids) < ASKED.max_tokens
    rounds, proposed, _ = drafted(output.outputs[0].token_origins)
    assert (rounds, proposed) == (output.metrics.num_drafts, output.metrics.num_draft_tokens)


def test_a_grammar_counts_its_legal_tokens(llm):
    """A choice between two words that differ in their first letter leaves the model that letter alone."""
    params = SamplingParams(temperature=0, token_origins=True, structured_outputs={"regex": "(a|b)0123"})
    (completion,) = llm.generate(PROMPTS[0], params)[0].outputs
    first, *others = completion.token_origins
    assert first.num_legal >= 2
    assert all(origin.num_legal >= 1 for origin in others)
    assert min(origin.num_legal for origin in others) == 1
    free = llm.generate(PROMPTS[0], ASKED)[0].outputs[0].token_origins
    assert {origin.num_legal for origin in free} == {None}
