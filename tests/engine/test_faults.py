"""What goes wrong ends the requests concerned and nothing else: the others get their tokens, the pool its pages."""

from __future__ import annotations

import functools
import itertools
import sys

import jax
import pytest

from jaxspec.api.detokenizer import Detokenizer
from jaxspec.engine import results
from jaxspec.engine.adaptive import Choice
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from tests.support.lively_models import new_engine, params, plain, repeating, serve, texts
from tests.support.sizes import cases

K = 3
PROGRAMS = ("prefill", "copy_pages", "launch", "catch_up")
PROMPTS = (repeating(7, 3, 1), repeating(7, 3, 1), repeating(5, 3, 2), repeating(22, 5, 3), repeating(4, 2, 4))
SAMPLING = tuple(params((14, 14, 9, 12, 6)))


@functools.cache
def own() -> Engine:
    """Speculation pauses every other launch, so that the draft has to catch up."""
    found = new_engine("noisy", K, page_size=4, num_pages=30, max_num_seqs=3)
    found.grown_shape = lambda *requests: (4, 16)
    choices = itertools.cycle([0, K])
    found.controller.choose = lambda *_, **__: Choice(next(choices))
    return found


def break_once(engine: Engine, monkeypatch, program: str, error: BaseException, *, after: int = 0, donated: bool):
    """The program's run number `after` raises; donated: when the device had taken the caches already."""
    run, seen = engine.runner.programs.run, itertools.count()

    def broken(name, config, weights, cache, *arrays):
        if name == program and next(seen) == after:
            if donated:
                for leaf in jax.tree.leaves(cache):
                    leaf.delete()
            raise error
        return run(name, config, weights, cache, *arrays)

    monkeypatch.setattr(engine.runner.programs, "run", broken)


def add_all(engine: Engine):
    """The first prompt with two samples, greedy, so that both say the same; the others wait for rows."""
    first = engine.add(PROMPTS[0], params(14, n=2)[0])
    return [*first.samples, *(engine.add(p, s) for p, s in zip(PROMPTS[2:], SAMPLING[2:], strict=True))]


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step(2)


def check_usable(engine: Engine) -> None:
    allocator = engine.scheduler.allocator
    assert not engine.busy
    assert not any(allocator.references)
    assert allocator.num_free == engine.num_pages
    assert texts(serve(engine, PROMPTS, SAMPLING, rounds=2)) == plain(PROMPTS, SAMPLING)


@cases("donated", [False, True], quick=[True])
@pytest.mark.parametrize(("program", "after"), [*((name, 0) for name in PROGRAMS), ("launch", 3), ("prefill", 1)])
def test_an_error_ends_those_it_hit(program, after, donated, monkeypatch):
    engine = own()
    emitted = engine.metrics.num_emitted_tokens
    break_once(engine, monkeypatch, program, RuntimeError("out of\n  memory"), after=after, donated=donated)
    requests, told = add_all(engine), set()
    while engine.busy:
        told |= {r for r in engine.step(2) if r.finish_reason}
    hit = [r for r in requests if r.finish_reason == "error"]
    assert 0 < len(hit) < len(requests)
    assert all(r.error == "RuntimeError: out of memory" and not r.pages and r.times.finished for r in hit)
    assert told == set(requests), "step returns all that ended"
    for request, tokens in zip(requests, plain(PROMPTS, SAMPLING), strict=True):
        if request in hit:
            assert request.output == tokens[: len(request.output)]
        else:
            assert (request.output, request.finish_reason, request.error) == (tokens, "length", None)
    assert engine.metrics.num_emitted_tokens - emitted == sum(len(r.output) for r in requests)
    check_usable(engine)


def check_that_an_interrupt_loses_nothing(engine: Engine) -> None:
    """One comes out of a step; who steps again gets every token."""
    requests = add_all(engine)
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    finish(engine)
    assert texts(requests) == plain(PROMPTS, SAMPLING)
    assert all(r.finish_reason == "length" for r in requests)
    check_usable(engine)


class Late:
    """What a program gives that fails after it was started."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def block_until_ready(self) -> None:
        raise self.error


def fail_late(engine: Engine, monkeypatch, program: str, error: BaseException, ended: list[Request]) -> None:
    """The first run of `program` fails when it is waited for; ended: whom the launch would have had, too."""
    start, failing = engine.runner.start, [True]

    def started(plan):
        result = start(plan)
        if plan.program == program and failing:
            failing.clear()
            ended.extend(r for r in engine.scheduler.running if r.prefilled)
            return Late(error)
        return result

    monkeypatch.setattr(engine.runner, "start", started)


@pytest.mark.parametrize("program", ["prefill", "copy_pages", "catch_up"])
def test_what_fails_while_a_launch_is_packed_is_not_the_launchs_trouble(program, monkeypatch):
    """The device is waited for only then. Rows that were decoding get their tokens all the same."""
    engine, decoding = own(), []
    older = engine.add(PROMPTS[3], SAMPLING[3])
    while not older.output:
        engine.step(2)
    fail_late(engine, monkeypatch, program, RuntimeError("late"), decoding)
    requests = [*add_all(engine), older]
    finish(engine)
    hit = [r for r in requests if r.finish_reason == "error"]
    assert hit
    assert {r.error for r in hit} == {"RuntimeError: late"}
    assert older in decoding
    if program != "catch_up":  # which is for the rows that decode
        assert older not in hit
    expected = [*plain(PROMPTS, SAMPLING), plain(PROMPTS, SAMPLING)[3]]
    for request, tokens in zip(requests, expected, strict=True):
        assert request.output == (tokens[: len(request.output)] if request in hit else tokens)
    check_usable(engine)


@pytest.mark.parametrize("program", ["prefill", "catch_up"])
def test_an_interrupt_while_the_device_is_waited_for(program, monkeypatch):
    engine = own()
    fail_late(engine, monkeypatch, program, KeyboardInterrupt(), [])
    check_that_an_interrupt_loses_nothing(engine)


@cases("donated", [False, True], quick=[True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_interrupt_loses_nothing(program, donated, monkeypatch):
    """It comes out of step; who steps again gets every token, whether the device had the caches or not."""
    engine = own()
    break_once(engine, monkeypatch, program, KeyboardInterrupt(), donated=donated)
    check_that_an_interrupt_loses_nothing(engine)


def test_an_interrupt_between_a_launch_and_its_taking_in(monkeypatch):
    engine = own()
    observe, seen = engine.controller.observe, itertools.count()

    def interrupted(*arguments, **named):
        if next(seen) == 2:
            raise KeyboardInterrupt
        observe(*arguments, **named)

    monkeypatch.setattr(engine.controller, "observe", interrupted)
    requests = add_all(engine)
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    finish(engine)
    assert texts(requests) == plain(PROMPTS, SAMPLING)
    check_usable(engine)


def test_an_interrupt_while_pages_are_made_anew(monkeypatch):
    """A second one, while the first is dealt with."""
    engine = own()

    def interrupted():
        monkeypatch.undo()
        raise KeyboardInterrupt

    break_once(engine, monkeypatch, "launch", KeyboardInterrupt(), after=2, donated=True)
    monkeypatch.setattr(engine.runner, "empty_cache", interrupted)
    requests = add_all(engine)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            finish(engine)
    finish(engine)
    assert texts(requests) == plain(PROMPTS, SAMPLING)
    check_usable(engine)


def test_all_may_be_aborted_after_an_interrupt(monkeypatch):
    engine = own()
    break_once(engine, monkeypatch, "launch", KeyboardInterrupt(), after=2, donated=True)
    requests = add_all(engine)
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    for request in requests:
        engine.abort(request)
    check_usable(engine)


def steps(engine: Engine, most: int = 200) -> int:
    """As finish, but an engine that spins fails."""
    for count in range(most):
        if not engine.busy:
            return count
        engine.step(2)
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("when", ["at once", "with the last token"])
def test_a_callback_that_fails_ends_its_own_row(when):
    """Its neighbours in the launch and who waits for a row go on."""
    engine = own()

    def find_stop(output, known):
        if when == "at once" or len(output) == SAMPLING[0].max_tokens:
            raise LookupError("no such text")

    first = engine.add(PROMPTS[0], SAMPLING[0])
    first.find_stop = find_stop
    others = [engine.add(p, s) for p, s in zip(PROMPTS[1:], SAMPLING[1:], strict=True)]
    steps(engine)
    assert (first.finish_reason, first.error, first.pages) == ("error", "LookupError: no such text", [])
    assert texts(others) == plain(PROMPTS, SAMPLING)[1:]
    assert first.output == plain(PROMPTS, SAMPLING)[0][: len(first.output)]
    check_usable(engine)


def test_log_probabilities_that_fail_end_their_own_row(monkeypatch):
    """Also where the row's last tokens are taken in."""
    engine, found = own(), results.token_logprobs
    asked = [*SAMPLING[:2], params(9, logprobs=1)[0], *SAMPLING[3:]]

    def failing(scores, row, count, n):
        if n and requests[2].num_tokens + count == requests[2].max_len:
            raise ArithmeticError("no such number")
        return found(scores, row, count, n)

    monkeypatch.setattr(results, "token_logprobs", failing)
    requests = [engine.add(p, s) for p, s in zip(PROMPTS, asked, strict=True)]
    steps(engine)
    assert (requests[2].finish_reason, requests[2].error) == ("error", "ArithmeticError: no such number")
    assert len(requests[2].logprobs) == len(requests[2].output) < 9
    rest = [0, 1, 3, 4]
    assert [requests[i].output for i in rest] == [plain(PROMPTS, SAMPLING)[i] for i in rest]
    check_usable(engine)


@pytest.mark.parametrize("asked", [{"top_k": 2**31}, {"min_p": "0.5"}, {"seed": 1.5}, {"logprobs": 2.5}])
def test_parameters_that_no_device_takes_end_their_own_row(asked):
    """SamplingParams refuses them, and the engine does; who gets past both hurts himself."""
    engine = own()
    bad = params(9, temperature=1.0)[0]
    requests = [engine.add(p, s) for p, s in zip(PROMPTS, [bad, *SAMPLING[1:]], strict=True)]
    for name, value in asked.items():
        object.__setattr__(requests[0].params, name, value)
        object.__setattr__(bad, name, value)
    with pytest.raises(ValueError, match=next(iter(asked))):
        engine.add(PROMPTS[0], bad)
    requests[0].seed = asked.get("seed", 0)
    steps(engine)
    assert requests[0].finish_reason == "error"
    assert texts(requests[1:]) == plain(PROMPTS, SAMPLING)[1:]
    check_usable(engine)


def test_a_request_given_up_in_the_middle_of_a_step(monkeypatch):
    """As a stream that is garbage-collected at any moment does."""
    engine = own()
    run, seen = engine.runner.programs.run, itertools.count()

    def giving_up(name, *arguments):
        if name == "launch" and next(seen) == 1:
            engine.abort(requests[0])
            engine.abort(requests[-1])
        return run(name, *arguments)

    monkeypatch.setattr(engine.runner.programs, "run", giving_up)
    requests = [engine.add(p, s) for p, s in zip(PROMPTS, SAMPLING, strict=True)]
    steps(engine)
    assert [r.finish_reason for r in requests] == ["abort", "length", "length", "length", "abort"]
    assert texts(requests[1:4]) == plain(PROMPTS, SAMPLING)[1:4]
    check_usable(engine)


class InterruptAt:
    """Raises KeyboardInterrupt before the count-th line of the engine's own files that is executed."""

    FILES = ("jaxspec/engine/", "jaxspec/cache/allocator", "jaxspec/api/detokenizer", "jaxspec/api/tokens")

    def __init__(self, count: int) -> None:
        self.left = count

    def __enter__(self) -> InterruptAt:
        sys.settrace(self.enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def enter(self, frame, event, argument):
        return self.line if any(name in frame.f_code.co_filename for name in self.FILES) else None

    def line(self, frame, event, argument):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.line


def lines() -> int:
    """So many are executed when `served` is not interrupted."""
    with InterruptAt(10**9) as counter:
        served(own())
    return 10**9 - counter.left


def served(engine: Engine) -> tuple[list[Request], list[str]]:
    """The first with a stop string that never comes, so that its text is read along."""
    requests = [engine.add(p, s) for p, s in zip(PROMPTS, SAMPLING, strict=True)]
    detokenizer = Detokenizer(Letters(), stop=("?",))
    requests[0].find_stop = detokenizer.find_stop
    while engine.busy:
        try:
            engine.step(2)
        except KeyboardInterrupt:
            continue
    return requests, [detokenizer.text]


class Letters:
    def decode(self, ids, skip_special_tokens):
        return "".join(chr(ord("A") + i) for i in ids)


@cases("share", range(8), quick=[3])
def test_an_interrupt_between_any_two_lines(share):
    """Every 8 * 47th line of a service, each time another one: every request gets every token, once."""
    engine = own()
    served(engine)  # what is compiled once
    total = lines()
    for count in range(1 + 47 * share, total, 8 * 47):
        with InterruptAt(count):
            try:
                requests, text = served(engine)
            except KeyboardInterrupt:  # within `add`: nothing was handed out
                for request in list(engine.open_requests.open.values()):
                    engine.abort(request)
                continue
        assert texts(requests) == plain(PROMPTS, SAMPLING), count
        assert text == [Letters().decode(requests[0].output, True)], count
        assert not engine.busy
    check_usable(engine)


def test_a_pass_that_fails_ends_those_that_it_held(monkeypatch):
    """Others wait for theirs, and get it."""
    engine = new_engine("noisy", K, page_size=4, num_pages=40, max_num_seqs=3, prefill_chunk=16)
    held: list[Request] = []
    start = engine.runner.start

    def started(plan):
        if plan.program == "prefill" and not held:
            held.append(requests[0])
            raise RuntimeError("out of memory")
        return start(plan)

    monkeypatch.setattr(engine.runner, "start", started)
    requests = [engine.add(p, s) for p, s in zip(([5] * 40, PROMPTS[2], PROMPTS[3]), SAMPLING[2:], strict=False)]
    finish(engine)
    assert [r.finish_reason for r in requests] == ["error", "length", "length"]


def test_a_copy_that_fails_ends_those_that_it_was_for(monkeypatch):
    engine = new_engine("noisy", K, page_size=4, num_pages=40, max_num_seqs=3)
    break_once(engine, monkeypatch, "copy_pages", RuntimeError("no copy"), donated=False)
    first, second = engine.add([5] * 11, params(30, n=2)[0]).samples
    engine.step(1)
    stranger = engine.add(PROMPTS[2], SAMPLING[2])
    finish(engine)
    assert [r.finish_reason for r in (first, second, stranger)] == ["length", "error", "length"]
    assert second.error == "RuntimeError: no copy"
