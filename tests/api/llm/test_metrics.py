"""What comes out beside the text: counts, times, progress, profiles."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from jaxspec import SamplingParams, SpecDecodeMetrics
from jaxspec.common import progress
from jaxspec.common.progress import generation_progress
from tests.api.llm.answers import GREEDY, PROMPTS


def test_metrics_per_request_and_in_total(llm):
    before = json.loads(json.dumps(llm.metrics.as_dict()))
    outputs = llm.generate(PROMPTS[:3], GREEDY)
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"):
        gained = llm.metrics.as_dict()[name] - before[name]
        assert gained == sum(getattr(o.metrics, name) for o in outputs)
        assert gained > 0
    for output in outputs:
        m = output.metrics
        assert m.num_emitted_tokens == 24
        assert len(m.num_accepted_tokens_per_pos) == 3
        assert m.num_accepted_tokens_per_pos == sorted(m.num_accepted_tokens_per_pos, reverse=True)
        assert m.mean_acceptance_length == pytest.approx(1 + m.num_accepted_tokens / m.num_drafts)
    assert llm.timing.tokens_per_second > 0


def test_timing_of_a_request(llm, monkeypatch):
    """More requests than rows: the last ones wait. The parts add up to the whole."""
    heard: list[Any] = []
    monkeypatch.setattr(llm, "observers", [lambda request: heard.append(request.times)])
    started = time.perf_counter()
    outputs = llm.generate(PROMPTS * 2, GREEDY)
    wall = time.perf_counter() - started
    for output in outputs:
        t = output.timing
        assert 0 <= t.queue_seconds <= t.queue_seconds + t.prefill_seconds <= t.time_to_first_token <= wall
        whole = t.queue_seconds + t.prefill_seconds + t.decode_seconds
        assert whole <= wall
        assert 0 < t.time_per_output_token * 23 == pytest.approx(whole - t.time_to_first_token)
    assert max(times.admitted for times in heard) > min(times.finished for times in heard)
    one = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))[0].timing
    assert one.time_to_first_token > 0
    assert one.time_per_output_token is None


@pytest.mark.thorough
def test_timing_lasts_until_the_last_sample(llm, monkeypatch):
    """Nine samples on four rows: the first ones are over when the last begins."""
    heard = []
    monkeypatch.setattr(llm, "observers", [heard.append])
    timing = llm.generate(PROMPTS[0], SamplingParams(n=9, max_tokens=24, ignore_eos=True))[0].timing
    times = [r.times for r in heard]
    assert len(times) == 9
    first, last = min(times, key=lambda t: t.admitted), max(times, key=lambda t: t.finished)
    assert first.finished < last.admitted
    assert timing.decode_seconds == last.finished - first.prefilled
    assert timing.queue_seconds == first.admitted - first.arrived
    assert timing.time_per_output_token == (last.finished - min(t.first_token for t in times)) / 23


@pytest.mark.thorough
def test_observers_hear_of_every_sample_once(llm, monkeypatch):
    heard = []
    monkeypatch.setattr(llm, "observers", [heard.append])
    llm.generate(PROMPTS, SamplingParams(n=2, max_tokens=4, ignore_eos=True))
    pieces = llm.stream(PROMPTS[0], GREEDY)
    next(pieces)
    pieces.close()
    assert [r.finish_reason for r in heard] == ["length"] * 10 + ["abort"]
    assert len(set(heard)) == 11


def test_progress_shows_running_totals(monkeypatch):
    """The cost of a report does not depend on the number of requests."""
    metrics = SpecDecodeMetrics(num_emitted_tokens=1000)
    with generation_progress(5000, metrics, enabled=True) as report:
        metrics += SpecDecodeMetrics(2, 8, [2, 1], 5)
        report(17)
        (work,) = progress.under_way
        shown = work.state()
    assert shown.startswith("17 of 5,000 samples, ")
    assert re.search(r": [1-9]\d*\.\d tokens/s, acceptance length 2\.50$", shown)


def test_a_profile(llm, tmp_path):
    assert llm.start_profile(tmp_path / "trace") == tmp_path / "trace"
    with pytest.raises(RuntimeError, match=r"a profile is being taken already, into .*trace: stop_profile\(\) ends it"):
        llm.start_profile()
    llm.generate(PROMPTS[0], GREEDY)
    assert llm.stop_profile() == tmp_path / "trace"
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    with pytest.raises(RuntimeError, match=r"no profile is being taken: start_profile\(\) begins one"):
        llm.stop_profile()


def test_a_profiles_own_folder(llm, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    folder = llm.start_profile()
    llm.stop_profile()
    assert folder.parent == tmp_path / "profiles"
    assert list(folder.rglob("*.xplane.pb"))
