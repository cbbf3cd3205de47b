"""What goes wrong ends the requests concerned and nothing else: the others get their tokens, the pool its pages."""

from __future__ import annotations

import functools
import itertools

import jax
import pytest

from jaxspec.engine.adaptive import Choice
from jaxspec.engine.engine import Engine
from tests.lively import new_engine, params, plain, repeating, serve, texts

K = 3
PROGRAMS = ("prefill", "copy_pages", "launch", "catch_up")
PROMPTS = (repeating(7, 3, 1), repeating(7, 3, 1), repeating(5, 3, 2), repeating(22, 5, 3), repeating(4, 2, 4))
SAMPLING = tuple(params((14, 14, 9, 12, 6)))


@functools.cache
def own() -> Engine:
    """Speculation pauses every other launch, so that the draft has to catch up."""
    found = new_engine("noisy", K, page_size=4, num_pages=30, max_num_seqs=3)
    found.grown_shape = lambda requests: (4, 16)
    choices = itertools.cycle([0, K])
    found.controller.choose = lambda *_, **__: Choice(next(choices))
    return found


def break_once(engine: Engine, monkeypatch, program: str, error: BaseException, *, after: int = 0, donated: bool):
    """The program's run number `after` raises; donated: when the device had taken the caches already."""
    run, seen = engine.programs.run, itertools.count()

    def broken(name, config, weights, cache, *arrays):
        if name == program and next(seen) == after:
            if donated:
                for leaf in jax.tree.leaves(cache):
                    leaf.delete()
            raise error
        return run(name, config, weights, cache, *arrays)

    monkeypatch.setattr(engine.programs, "run", broken)


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


@pytest.mark.parametrize("donated", [False, True])
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


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_interrupt_loses_nothing(program, donated, monkeypatch):
    """It comes out of step; who steps again gets every token, whether the device had the caches or not."""
    engine = own()
    break_once(engine, monkeypatch, program, KeyboardInterrupt(), donated=donated)
    requests = add_all(engine)
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    finish(engine)
    assert texts(requests) == plain(PROMPTS, SAMPLING)
    assert all(r.finish_reason == "length" for r in requests)
    check_usable(engine)


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
    monkeypatch.setattr(engine, "empty_cache", interrupted)
    requests = add_all(engine)
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


def test_a_callback_that_fails_ends_the_launch_it_looked_at():
    """Who waits for a row goes on."""
    engine = own()

    def find_stop(output, known):
        raise LookupError("no such text")

    first = engine.add(PROMPTS[0], SAMPLING[0])
    first.find_stop = find_stop
    others = [engine.add(p, s) for p, s in zip(PROMPTS[1:], SAMPLING[1:], strict=True)]
    finish(engine)
    assert (first.finish_reason, first.error) == ("error", "LookupError: no such text")
    assert others[-1].output == plain(PROMPTS, SAMPLING)[-1]
    check_usable(engine)
