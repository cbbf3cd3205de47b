"""Prompts that ride along in the passes of rows that decode: which pieces go where, who decodes when, and what the
draft reads of them. The soak has them in every mixture."""

from __future__ import annotations

import pytest

from jaxspec.engine import riding
from jaxspec.engine.batch import ChunkShape
from jaxspec.engine.results import Lag
from jaxspec.sampling_params import SamplingParams
from tests import lively_heads, tiny_models
from tests.engine.schedules import request
from tests.lively_models import OPTIONS, PROMPTS, noisy, plain, repeating, target
from tests.sizes import cases

SHAPE = ChunkShape(2, 4, 2)
LONG = repeating(40, 7, 3)
K = 4


# The plan


def test_pieces_are_planned_oldest_first_and_rows_join_when_their_prompt_is_done():
    """13 tokens to read are four pieces, two a pass; the second request's 4 are one."""
    first, second = request(14), request(5, id=1)
    ride = riding.plan([first, second], SHAPE, 16, room=2)
    assert [[(r.id, start, n) for r, start, n in one] for one in ride.passes] == [
        [(0, 0, 4), (0, 4, 4)],
        [(0, 8, 4), (0, 12, 1)],
        [(1, 0, 4)],
    ]
    assert ride.ready == {first: 2, second: 3}
    assert (ride.joining, ride.absent) == ([first], [second]), "one whose prompt ends with the last pass comes after it"


def test_as_many_passes_as_rounds():
    ride = riding.plan([request(40)], SHAPE, 3, room=1)
    assert len(ride.passes) == 3
    assert (ride.ready, ride.joining) == ({}, [])


def test_without_a_free_row_passes_are_full_or_there_is_none():
    assert riding.plan([request(5)], SHAPE, 16, room=0) is None
    ride = riding.plan([request(14)], SHAPE, 16, room=0)
    assert [len(one) for one in ride.passes] == [2, 2]
    assert ride.joining == []


# What the draft reads


@pytest.mark.parametrize(
    ("read", "held", "drafted", "after"),
    [
        (0, 0, True, 20),
        (16, 16, True, 20),
        (16, 12, True, 12),  # it lacks what stands before: it has to catch up
        (0, 0, False, 0),
        (16, 16, False, 16),
    ],
)
def test_the_draft_holds_what_it_read_without_a_gap(read, held, drafted, after):
    """read, held: positions in the target's cache and the draft's, before the target reads up to position 20."""
    row = request(30)
    row.target_len, row.draft_len = read, held
    assert Lag(100, 1, 0).after(row, 20, drafted=drafted) == after
    assert Lag(100, None, 0).after(row, 20, drafted=drafted) == 20, "it has no cache"


def riding_engine(method: str):
    options = {"num_speculative_tokens": K, "adaptive": True}
    sizes = OPTIONS | {"max_num_seqs": 2, "page_size": 4, "enable_prefix_caching": False}
    if method == "eagle3":
        engine = lively_heads.engine(method, K, spec=options, **sizes)
    else:
        engine = tiny_models.engine(target(), options | {"model": "x"}, noisy(target()), **sizes)
    engine.grown_shape = lambda *requests: (2, 17)
    engine.riding_shape = ChunkShape(2, 16, 2)
    return engine


@cases("method", ["draft_model", "eagle3"], quick=["draft_model"])
def test_where_nothing_is_drafted_the_draft_reads_no_prompt_and_catches_up(method):
    """The row that was there goes on plainly; then speculation pays, and the newcomer has drafts accepted."""
    engine, plans = riding_engine(method), []
    execute = engine.runner.execute
    engine.runner.execute = lambda plan: plans.append((plan.program, plan.k)) or execute(plan)
    choose, speculates = engine.controller.choose, [False]

    def chosen(kind, rows, **how):
        choice = choose(kind, rows, **how)
        return type(choice)(K if speculates[0] else 0, 2)

    engine.controller.choose = chosen
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    first = engine.add(PROMPTS[1], sampling)
    engine.step(2)
    assert plans.pop() == ("launch", 0)
    second = engine.add(LONG, sampling)
    while not second.output:
        engine.step(2)
        assert plans[-1] == ("launch", 0), "in passes of the other's rounds"
    assert second.target_len >= len(LONG) - 1
    assert second.draft_len == 0
    speculates[0] = True
    while engine.busy:
        engine.step(2)
    assert ("catch_up", 0) in plans
    assert second.metrics.num_accepted_tokens > 0
    assert [first.output, second.output] == plain((PROMPTS[1], LONG), (sampling, sampling))


def test_where_something_is_drafted_the_draft_reads_along():
    engine, plans = riding_engine("draft_model"), []
    execute = engine.runner.execute
    engine.runner.execute = lambda plan: plans.append(plan.program) or execute(plan)
    engine.controller.adaptive = False
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add(PROMPTS[1], sampling)
    engine.step(1)
    second = engine.add(LONG, sampling)
    while engine.busy:
        engine.step(1)
    assert plans.count("prefill") == 1
    assert "catch_up" not in plans
    assert second.metrics.num_accepted_tokens > 0
