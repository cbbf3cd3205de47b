"""Random requests through engines that are short of everything, against plain decoding alone.

    python -m tests.support.soak --requests 2000 --methods 3 --seed 0

Of all methods some are drawn. Requests arrive over time, some begin alike, some have several samples, some are aborted;
the pool is so small that rows are preempted all the time; every launch runs another number of rounds, with other
made-up costs of speculation. The same seed gives the same run. Every greedy and every seeded output has to equal what
the request gets alone and without speculation; exit status 1 where one does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
import unittest.mock
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

import tests.conftest  # noqa: F401  (first: it sets the process up)
from jaxspec.cache.allocator import PageAllocator
from jaxspec.drafters.methods import LOOKUP, split
from jaxspec.engine import sizing
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import FindStop, Request, TokenLogprobs
from jaxspec.grammars.automaton import Automaton
from jaxspec.options.sampling_params import SamplingParams
from tests.support import grammars, lively_heads, tiny_models
from tests.support.lively_models import OPTIONS, VOCAB, new_engine, noisy, repeating, target

DRAFTERS = ("draft_model", *lively_heads.KINDS)
METHODS = ("ngram", *DRAFTERS, *(LOOKUP + name for name in DRAFTERS))
K = 4
TINY = {"page_size": 4, "num_pages": 17, "max_num_seqs": 6, "grammar_pool_mib": 1}
# Texts of many windows, of which the pool of layers with a window holds the end.
WINDOWED = {"max_model_len": 128, "num_pages": 72, "rounds_per_launch": 2, "prefill_chunk": 16}
REFERENCE = {"max_num_seqs": 32, "num_pages": 160, "enable_prefix_caching": False}
LONGEST_PROMPT, MOST_TOKENS = 40, 23
TOLERANCE = 1e-4  # of log-probabilities
AUTOMATA = [grammars.random(VOCAB, 9, seed, (0,), legal=0.4) for seed in range(6)]  # more than the pool has room for
PHASES = ("queue", "prefill", "decoding")


@dataclasses.dataclass(frozen=True)
class Case:
    """A request.

    stop_at: an id at which the caller's stop callback ends it.
    arrives: the step before which it comes.
    aborted: the phase in which its samples are aborted, None for those that live.
    seed: of those who ask for none.
    automaton: of its grammar.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...]
    stop_at: int | None
    arrives: int
    aborted: str | None
    seed: int
    automaton: Automaton | None = None

    @property
    def predictable(self) -> bool:
        return self.params.greedy or self.params.seed is not None

    def add_to(self, engine: Engine, params: SamplingParams) -> Request:
        request = engine.add(self.prompt, params, bad_words=self.bad_words, stop_ids=(0,), automaton=self.automaton)
        for sample in request.samples:
            sample.find_stop = self.find_stop()
        return request

    def find_stop(self) -> FindStop | None:
        if self.stop_at is None:
            return None
        return lambda output, known: next((i + 1 for i in range(known, len(output)) if output[i] == self.stop_at), None)


def draw(rng: np.random.Generator, count: int, longest: int = LONGEST_PROMPT) -> list[Case]:
    """Requests in the order of their arrival, with prompts of at most `longest` tokens."""
    chance = lambda p: bool(rng.random() < p)
    ids = lambda n: tuple(int(i) for i in rng.integers(0, VOCAB, n))
    beginnings = [*(ids(longest) for _ in range(3)), *(repeating(longest, p, p) for p in (3, 5, 7))]
    cases, arrives = [], 0
    for _ in range(count):
        length = 1 + int(longest * rng.random() ** 2)  # mostly short: those grow
        alike = int(rng.integers(0, length + 1)) if chance(0.5) else length * chance(0.5)
        prompt = beginnings[rng.integers(len(beginnings))][:alike] + ids(length - alike)
        wanted: dict = {"max_tokens": int(rng.integers(1, MOST_TOKENS + 1))}
        if chance(0.5):
            wanted |= {"temperature": 0.0}
        else:
            wanted |= {"temperature": float(rng.uniform(0.4, 1.5)), "seed": int(rng.integers(1 << 60))}
            wanted |= [{}, {}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.1}, {"seed": None}][rng.integers(6)]
        if chance(0.15):
            wanted |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.3}
        if chance(0.1):
            wanted |= {"logit_bias": dict(zip(ids(3), (3.0, -100.0, 5.0), strict=True))}
        if chance(0.1):
            wanted |= {"allowed_token_ids": ids(int(rng.integers(1, 16)))}
        if chance(0.3):
            wanted |= {"stop_token_ids": ids(3), "min_tokens": int(rng.integers(0, min(wanted["max_tokens"], 6)))}
        if chance(0.2):
            wanted |= {"logprobs": int(rng.integers(0, 4))}
        if chance(0.15):
            wanted |= {"prompt_logprobs": int(rng.integers(0, 4))}
        if chance(0.2):
            wanted |= {"num_speculative_tokens": int(rng.integers(0, K + 1))}
        if chance(0.2):
            wanted |= {"n": int(rng.integers(2, 4))}
        arrives += int(chance(0.5)) if chance(0.95) else 20  # mostly faster than they can be served
        cases.append(
            Case(
                prompt=prompt,
                params=SamplingParams(**wanted),
                bad_words=tuple(ids(n) for n in (1, 2, 3)) if chance(0.1) else (),
                stop_at=int(rng.integers(VOCAB)) if chance(0.15) else None,
                arrives=arrives,
                aborted=PHASES[rng.integers(3)] if chance(0.2) else None,
                seed=int(rng.integers(1 << 60)),
                automaton=AUTOMATA[rng.integers(len(AUTOMATA))] if chance(0.2) else None,
            )
        )
    return cases


class CountingAllocator(PageAllocator):
    """Counts the known pages that had to be given away."""

    num_evicted = 0

    def allocate(self, count: int) -> list[int]:
        if count <= self.num_free:
            self.num_evicted += max(count - len(self.free), 0)
        return super().allocate(count)


@dataclasses.dataclass
class Soak:
    """One engine under test. Its launches have one shape, because compiling would take longest by far, and its
    controller sees costs that change now and then, so that every number of drafts is chosen."""

    engine: Engine
    rng: np.random.Generator
    requests: list[Request] = dataclasses.field(default_factory=list)
    launches: Counter[int] = dataclasses.field(default_factory=Counter)
    aborted: Counter[str] = dataclasses.field(default_factory=Counter)
    passes: Counter[str] = dataclasses.field(default_factory=Counter)
    steps: int = 0

    def __post_init__(self) -> None:
        engine, launch, observe = self.engine, self.engine.launch, self.engine.controller.observe
        engine.scheduler.allocator = CountingAllocator(engine.num_pages)
        if engine.scheduler.windows:
            engine.scheduler.windows.allocator = engine.scheduler.allocator
        engine.grown_shape = lambda *requests: (6, 32)  # type: ignore[method-assign]
        engine.scheduler.max_num_seqs += 2  # read ahead, as where there are more rows
        engine.catalogue.spare[6] = 2
        settle = engine.prefilling.settle

        def counted(requests, k, *arguments):
            self.launches[k] += 1
            self.passes["queued"] += len(engine.open_requests.queued)
            return launch(requests, k, *arguments)

        def settled(count=None):
            self.passes["waited for"] += len(engine.open_requests.queued if count is None else range(count))
            settle(count)

        def made_up(kind, k, seconds, num_rounds, **rest):
            cost = 1.0 + k * (0.02, 0.6)[self.steps // 30 % 2] * self.rng.uniform(0.3, 1.7)
            observe(kind, k, cost * num_rounds, num_rounds, **rest)

        engine.launch, engine.controller.observe = counted, made_up  # type: ignore[method-assign]
        engine.prefilling.settle = settled  # type: ignore[method-assign]

    def serve(self, cases: Sequence[Case], progress: Callable[[str], None] = lambda line: None) -> None:
        engine, coming, first = self.engine, list(reversed(cases)), self.steps
        cases_of: list[tuple[Case, Request]] = []
        while coming or engine.busy:
            while coming and coming[-1].arrives <= self.steps - first:
                case = coming.pop()
                request = case.add_to(engine, case.params)
                if case.params.seed is None:
                    for sample in request.samples:
                        sample.seed = case.seed + sample.index
                self.requests.append(request)
                if case.aborted:
                    cases_of.append((case, request))
            self.abort_some(cases_of)
            engine.step(int(self.rng.integers(1, 9)))
            self.steps += 1
            held = Counter(page for r in engine.scheduler.running for page in r.pages)
            assert engine.scheduler.allocator.references == [held[page] for page in range(engine.num_pages)]
            tables = Counter(r.automaton.digest for r in engine.scheduler.running if r.automaton)
            assert all(table.users == tables[name] for name, table in engine.scheduler.grammars.resident.items())
            if self.steps % 200 == 0:
                progress(f"  step {self.steps}, {len(coming)} to come, {self.figures()}")

    def abort_some(self, doomed: list[tuple[Case, Request]]) -> None:
        for case, request in doomed:
            for sample in request.samples:
                phase = "decoding" if sample.output else "prefill" if sample.pages else "queue"
                if sample.finish_reason is None and phase == case.aborted and self.rng.random() < 0.5:
                    self.engine.abort(sample)
                    self.aborted[phase] += 1
        doomed[:] = [(c, r) for c, r in doomed if any(s.finish_reason is None for s in r.samples)]

    def check_idle(self) -> None:
        """Everything came back, and the counters add up."""
        scheduler, metrics = self.engine.scheduler, self.engine.metrics
        allocator = scheduler.allocator
        assert not scheduler.running
        assert not scheduler.waiting
        assert allocator.num_free == allocator.num_pages
        assert not any(allocator.references)
        assert set(allocator.kept) == set(allocator.digest_of) == set(allocator.page_of.values())
        assert scheduler.windows is None or scheduler.windows.num_free == scheduler.windows.num_pages
        samples = [s for r in self.requests for s in r.samples]
        assert metrics.num_emitted_tokens == sum(len(s.output) for s in samples)
        assert metrics.num_accepted_tokens == sum(s.metrics.num_accepted_tokens for s in samples)

    def figures(self) -> str:
        scheduler, metrics = self.engine.scheduler, self.engine.metrics
        return (
            f"{metrics.num_emitted_tokens} tokens, {scheduler.num_preemptions} preemptions, "
            f"{scheduler.allocator.num_evicted} pages evicted, acceptance length {metrics.mean_acceptance_length:.2f}, "
            f"launches by drafts {dict(sorted(self.launches.items()))}, passes over prompts {dict(self.passes)}, "
            f"aborted {dict(self.aborted)}, "
            f"{self.engine.runner.programs.num_compiled} programs"
        )


def tiny_engine(method: str, family: str = "llama", **more) -> Engine:
    """One of METHODS."""
    looks_up, name = split(method)
    options = {"num_speculative_tokens": K, "adaptive": True, "prompt_lookup_min": 1}
    if name in lively_heads.KINDS:
        own = lively_heads.KINDS[name][0]
        return lively_heads.engine(name, K, family, spec=options | {"method": LOOKUP * looks_up + own}, **TINY | more)
    draft = noisy(target(family)) if name == "draft_model" else None
    options |= {"method": method} | ({"model": "x"} if draft else {})
    return tiny_models.engine(target(family), options, draft, **OPTIONS | TINY | more)


def windowed_engine(method: str, family: str) -> Engine:
    """One whose layers with a window have a pool of their own, with room for the two rows that `Soak` adds."""
    with unittest.mock.patch.object(sizing, "most_running", lambda rows: rows + 2):
        engine = tiny_engine(method, family, **WINDOWED)
    assert engine.scheduler.windows is not None
    return engine


def reference_engine(family: str = "llama", **options) -> Engine:
    """Plain decoding of many rows that do not influence each other: no preemption, no reuse, one shape."""
    engine = new_engine("plain", 0, family, **REFERENCE | options)
    rows = engine.config.max_num_seqs
    pages = engine.scheduler.pages_for(engine.limits.max_model_len)
    engine.grown_shape = lambda *requests: (rows, pages)  # type: ignore[method-assign]
    engine.catalogue.spare.clear()
    return engine


def plainly(engine: Engine, wanted: Sequence[tuple[Case, int]]) -> list[Request]:
    """What each (case, seed of a sample) gets."""
    requests = []
    for case, seed in wanted:
        params = dataclasses.replace(case.params, n=1, seed=None if case.params.seed is None else seed)
        requests.append(case.add_to(engine, params))
    while engine.busy:
        engine.step(32)
    return requests


def alone(engine: Engine, case: Case, seed: int) -> Request:
    """What a request gets alone; the other row is itself once more."""
    return plainly(engine, [(case, seed), (case, seed)])[0]


def close(a: list[TokenLogprobs], b: list[TokenLogprobs]) -> bool:
    values = lambda x: [x.logprob, *x.top_logprobs]
    return len(a) == len(b) and all(np.allclose(values(x), values(y), 0, TOLERANCE) for x, y in zip(a, b, strict=True))


def complaint(case: Case, sample: Request, expected: Request | None) -> str | None:
    """What is wrong with a sample; expected: what plain decoding gives, None where that is left to chance."""
    aborted, asked, count = sample.finish_reason == "abort", case.params, len(sample.output)
    if aborted and case.aborted is None:
        return "aborted by nobody"
    if not aborted and sample.finish_reason not in ("stop", "length", "error"):
        return f"finish_reason {sample.finish_reason}"
    if asked.allowed_token_ids is not None and not set(sample.output) <= set(asked.allowed_token_ids):
        return "an id that is not allowed"
    if case.automaton and not grammars.obeys(case.automaton, sample.output):
        return "an id that is not legal"
    if asked.logprobs is not None and len(sample.logprobs) != count:
        return f"{len(sample.logprobs)} log-probabilities of {count} tokens"
    if expected is None:
        return None
    if sample.output != expected.output[:count]:
        return f"output {sample.output} instead of {expected.output}"
    if not aborted and (sample.output, sample.finish_reason) != (expected.output, expected.finish_reason):
        return f"ended {sample.finish_reason} after {count} instead of {expected.finish_reason}: {sample.error}"
    if not close(sample.logprobs, expected.logprobs[: len(sample.logprobs)]):
        return "log-probabilities differ"
    if sample.index == 0 and not aborted and not close(sample.prompt_logprobs, expected.prompt_logprobs):
        return "log-probabilities of the prompt differ"
    return None


def complaints(cases: Sequence[Case], requests: Sequence[Request], reference: Engine, num_alone: int = 0) -> list[str]:
    """Everything that is wrong. num_alone: so many samples' reference is compared with one truly alone."""
    pairs = [(case, s) for case, request in zip(cases, requests, strict=True) for s in request.samples]
    known = [(case, s.seed) for case, s in pairs if case.predictable]
    expected = iter(found := plainly(reference, known))
    problems = []
    for case, sample in pairs:
        if problem := complaint(case, sample, next(expected) if case.predictable else None):
            problems.append(f"request {sample.id} sample {sample.index}, {case}: {problem}")
    if num_alone:
        lonely = reference_engine(max_num_seqs=2)
        for i in range(0, len(known), max(len(known) // num_alone, 1)):
            own = alone(lonely, *known[i])
            if (own.output, own.finish_reason) != (found[i].output, found[i].finish_reason):
                problems.append(f"{known[i]}: {found[i].output} among others, {own.output} alone")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--methods", type=int, default=3, help=f"so many, of {', '.join(METHODS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", type=int, default=100, help="samples whose reference is checked alone")
    options = parser.parse_args(arguments)
    say = lambda line: print(line, flush=True)
    rng = np.random.default_rng(options.seed)
    reference, problems = reference_engine(), []
    drawn = rng.choice(METHODS, size=min(options.methods, len(METHODS)), replace=False).tolist()
    shares = [len(part) for part in np.array_split(np.arange(options.requests), len(drawn))]
    for name, count in zip(drawn, shares, strict=True):
        started = time.perf_counter()
        soak = Soak(tiny_engine(name), rng)
        cases = draw(rng, count)
        say(f"{name}: {count} requests")
        soak.serve(cases, say)
        soak.check_idle()
        say(f"  served in {time.perf_counter() - started:.0f} s, {soak.steps} steps: {soak.figures()}")
        found = complaints(cases, soak.requests, reference, options.alone // len(drawn))
        say(f"  checked after {time.perf_counter() - started:.0f} s: {len(found)} wrong")
        problems += [f"{name}: {problem}" for problem in found]
    for problem in itertools.islice(problems, 20):
        say(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
