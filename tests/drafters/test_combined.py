"""Prompt lookup with a draft model: what is looked up first, then the draft's; the draft's cache misses nothing."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.pages import PagedKV, PagedKVCache
from jaxspec.drafters.base import Drafter, Proposal
from jaxspec.drafters.combined import Combined
from jaxspec.drafters.ngram import NGram
from tests.drafters.histories import history
from tests.support.lively_models import PROMPTS, new_engine, params, plain, serve, texts

K, V = 3, 20
NO_LOOKUP = {"prompt_lookup_min": 60, "prompt_lookup_max": 60}


class Counting(Drafter):
    """A draft whose i-th token is 10 + i."""

    def propose(self, params, cache, history, choose):
        drafts, probs = jnp.zeros((history.tokens.shape[0], K), jnp.int32), []
        for i in range(K):
            token, p = choose(None, jnp.zeros((drafts.shape[0], V)).at[:, 10 + i].set(9.0), drafts, i)
            drafts = drafts.at[:, i].set(token)
            probs.append(p)
        stacked = None if probs[0] is None else jnp.stack(probs, axis=1)
        return Proposal(drafts, stacked, history.num_wanted), cache.draft


@pytest.mark.parametrize("certain", [False, True])
def test_looked_up_first_then_drafted(certain):
    """Rows that find three tokens, one, and none; all propose K, and q of what was looked up is one-hot."""
    rows = [[1, 2, 7, 8, 9, 1, 2], [5, 5, 5], [1, 2, 3]]
    seen = []

    def choose(decoder, logits, drafts, i):
        seen.append(drafts[:, :i].T.tolist())
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), None if certain else jax.nn.softmax(logits, axis=-1)

    cache = PagedKVCache((), (PagedKV(jnp.zeros((1, 1, 2, 1))),))
    drafter = Combined(K, NGram(K, 2, 3), Counting(K))
    proposal, pages = drafter.propose({}, cache, history(rows, 12, K), choose)
    assert proposal.tokens.tolist() == [[7, 8, 9], [5, 11, 12], [10, 11, 12]]
    assert proposal.num_proposed.tolist() == [K] * 3
    assert proposal.num_looked_up.tolist() == [3, 1, 0]
    assert pages is cache.draft
    # The draft chooses after what was looked up, as if it had proposed it.
    assert seen == [[], [[7, 5, 10]], [[7, 5, 10], [8, 11, 11]]]
    if certain:
        assert proposal.probs is None
    else:
        looked_up = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
        probs = np.asarray(proposal.probs)
        np.testing.assert_array_equal(probs[looked_up], np.eye(V)[np.asarray(proposal.tokens)[looked_up]])
        assert ((probs.max(axis=-1) < 1) == ~looked_up).all()
        np.testing.assert_allclose(probs.sum(axis=-1), 1.0, rtol=1e-6)


def engine(draft: str, **spec):
    return new_engine(draft, K, "loops", spec={"method": "ngram+draft_model", "prompt_lookup_min": 3} | spec)


@pytest.mark.thorough
def test_without_a_match_it_is_the_draft_model():
    """Round by round: the same drafts are accepted."""
    sampling = tuple(params((24,) * 5))
    alone, combined = new_engine("noisy", K, "loops"), engine("noisy", **NO_LOOKUP)
    runs = [serve(e, PROMPTS, sampling) for e in (alone, combined)]
    assert [r.metrics.as_dict() for r in runs[0]] == [r.metrics.as_dict() for r in runs[1]]
    assert texts(runs[1]) == plain(PROMPTS, sampling, "loops")


def test_the_draft_reads_what_was_looked_up(monkeypatch):
    """Lookups in the first rounds only, by a draft that equals the target: afterwards it is always right, with a cache
    that lacks nothing of what was looked up, accepted or not."""
    right, until = NGram.propose, 30

    def early(self, params, pages, history, choose):
        found, pages = right(self, params, pages, history, choose)
        few = jnp.where(history.num_tokens < until, found.num_proposed, 0)
        return Proposal(found.tokens, None, few), pages

    monkeypatch.setattr(NGram, "propose", early)
    combined = engine("itself", prompt_lookup_min=1)
    prompts = PROMPTS[1:4]
    sampling = [dataclasses.replace(one, token_origins=True) for one in params((40,) * 3)]
    requests = [combined.add(p, s) for p, s in zip(prompts, sampling, strict=True)]
    wrong, seen = 0, 0
    while combined.busy:
        before = {r.id: (r.num_tokens, r.metrics.num_drafts, r.metrics.num_accepted_tokens) for r in requests}
        combined.step(1)
        for request in requests:
            count, rounds, accepted = before[request.id]
            if request.metrics.num_drafts == rounds or request.finish_reason:
                continue
            failed = request.metrics.num_accepted_tokens - accepted < K
            wrong += failed and count < until
            if count >= until:
                seen += 1
                assert not failed
    assert wrong > 3
    assert seen > 6
    assert texts(requests) == plain(prompts, tuple(sampling), "loops")
    assert_origins(requests, until)


def assert_origins(requests, until: int) -> None:
    """Each accepted token has the one of the two that proposed it: lookups come first, and only in the first rounds."""
    accepted = []
    for request in requests:
        assert len(request.places) == len(request.output)
        accepted += [(len(request.prompt) + at, p) for at, p in enumerate(request.places) if p.accepted]
    assert {place.looked_up for _, place in accepted} == {True, False}
    assert all(at - place.position < until for at, place in accepted if place.looked_up)
    assert all(not place.looked_up for at, place in accepted if at - place.position >= until)
