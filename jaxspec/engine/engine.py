"""Engine, which schedules requests between launches (runs of many rounds) of the device program. It sees no text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from jaxspec.cache.allocator import PageAllocator
from jaxspec.decode.state import LaunchResult
from jaxspec.engine import admission, assembly, batch, results, sizing
from jaxspec.engine.account import stopwatch
from jaxspec.engine.adaptive import PROBE_ROUNDS, Controller
from jaxspec.engine.catalogue import most_running
from jaxspec.engine.grammar_pool import GrammarPool
from jaxspec.engine.metrics import Timing
from jaxspec.engine.open_requests import CachesLost, OpenRequests
from jaxspec.engine.prefilling import Prefilling
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.scheduler import Scheduler
from jaxspec.grammars.automaton import Automaton
from jaxspec.hardware.platforms import facts
from jaxspec.models.model import Model
from jaxspec.options.engine import MAX_ROUNDS, EngineConfig
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.peers import Peers
from jaxspec.parallel.placement import Placement
from jaxspec.runtime.plans import Plan
from jaxspec.runtime.programs import Programs
from jaxspec.verify.rules import RULES
from pallas_kernels.device import CPU, Device

FEWER_ROUNDS = 16  # maximum number of rounds of a launch if the host has to look for stop strings
SHOWN_EVERY = 1 / 20  # maximum seconds of a launch while a client streams, so that tokens seem to come one by one


class Engine:
    """An engine that serves requests with a target and, if speculative is given, a drafter (model, if any: `draft`).

    device: the device that programs are compiled for.
    programs: the compiled programs; several engines may share them.
    peers: the job's other processes, which run the same device programs.
    timing: the seconds spent before the engine was made, for example on loading; the engine adds its own.
    """

    def __init__(
        self,
        target: Model,
        config: EngineConfig,
        *,
        placement: Placement,
        speculative: SpeculativeConfig | None = None,
        draft: Model | None = None,
        device: Device = CPU,
        programs: Programs | None = None,
        peers: Peers | None = None,
        timing: Timing | None = None,
    ) -> None:
        self.config = config
        self.speculative = speculative
        models = {"target": target} | ({"draft": draft} if draft else {})
        self.runner = Runner(models, config, speculative, placement, device, programs or Programs(placement), peers)
        self.layout = layout = self.runner.decoding.target.layout
        self.lag = results.Lag.of(self.runner.decoding)
        self.limits = admission.Limits(
            max_model_len=self.runner.decoding.target.max_model_len,
            vocab_size=target.config.vocab_size,
            num_drafts=max(self.runner.drafters),
            rule=speculative.rejection_sample_method if speculative else None,
        )
        self.scheduler = Scheduler(
            PageAllocator(layout.num_pages),
            layout.page_size,
            most_running(config.max_num_seqs),
            self.num_drafts,
            reuse=config.enable_prefix_caching,
            lookahead=self.lag.lookahead,
            reach=max((drafter.reach for drafter in self.runner.drafters.values() if drafter), default=0),
            longest=self.limits.max_model_len,
            copies=layout.by_position,
            grammars=GrammarPool(config.grammar_pool_mib, self.limits.vocab_size),
            window_pool=layout.window_pool,
        )
        self.open_requests = OpenRequests(self.scheduler, self.runner)
        longest = self.limits.max_model_len + self.num_drafts
        self.catalogue = assembly.catalogue(config, speculative, device, longest, lags=self.lag.most is not None)
        chunk = sizing.chunk_shape(config, device.platform, several=layout.by_position)
        self.prefilling = Prefilling(self.open_requests, self.catalogue, chunk, self.lag, self.timed)
        self.platform = facts(device.platform)
        self.controller = Controller(
            tuple(self.runner.drafters),
            adaptive=speculative is not None and speculative.adaptive,
            draft_cost=self.runner.draft_cost,
        )
        self.launch_seconds = 0.0  # duration of the last launch
        self.timing = timing or Timing()
        self.reset_metrics()
        self.ids = itertools.count()

    @property
    def num_drafts(self) -> int:
        """K, the maximum number of draft tokens of a round."""
        return self.limits.num_drafts

    @property
    def num_pages(self) -> int:
        """P, the number of pages in the KV cache's pool."""
        return self.layout.num_pages

    def reset_metrics(self) -> None:
        """Set all counters of speculative decoding to zero."""
        self.metrics = self.limits.no_counts()

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        stop_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        automaton: Automaton | None = None,
    ) -> Request:
        """Queue the n samples of a request. Return the first sample, whose `samples` lists all n. Nothing runs yet.

        Arguments: as in `admission.check`; automaton: as in `Request`. Raises UserError as `check` does.
        """
        checked = self.check(prompt, params, bad_words, stop_ids)
        self.scheduler.grammars.check(automaton)
        samples = admission.samples(self.limits, self.ids, *checked, bad_words, stop_ids, automaton)
        self.open_requests.add(samples)
        return samples[0]

    def check(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        bad_words: Sequence[Sequence[int]] = (),
        stop_ids: Sequence[int] = (),
    ) -> tuple[list[int], SamplingParams]:
        """Return checked copies of prompt and parameters. Raises UserError for a request that cannot be served."""
        checked = admission.check(self.limits, prompt, params, bad_words, stop_ids)
        self.scheduler.check(self.limits.max_len(*checked))
        return checked

    @property
    def busy(self) -> bool:
        return bool(self.open_requests.open)

    def step(self, num_rounds: int | None = None, *, streaming: bool = False) -> list[Request]:
        """Admit requests, run the prefill passes that are due, and one launch. Return the requests that took part.

        Requests that ended have a finish_reason. A pass that fails ends its requests with finish_reason "error", and
        raises nothing. num_rounds: maximum number of rounds of the launch; None for the engine's default.
        streaming: whether a client streams the tokens, so that the launch must be short.
        """
        participants: list[Request] = []
        with self.open_requests.step():
            try:
                self.advance(num_rounds, streaming, participants)
            except CachesLost:
                self.open_requests.lose_caches()
            failed = self.open_requests.take_failed()
        return sorted({*participants, *failed}, key=lambda r: r.id)

    def advance(self, num_rounds: int | None, streaming: bool, participants: list[Request]) -> None:
        """Do the work of `step`, and append the requests that take part to `participants`. Raises: CachesLost."""
        queued = self.open_requests.queued  # passes that the last step started and left running
        earlier, reading = len(queued), sum(item.rows > 0 for item in queued)
        if not self.scheduler.running:
            self.catalogue.idle()
        self.admit()
        participants += self.prefilling.unread
        limit = self.prefilling.pass_seconds(self.config.max_gap_ms or self.platform.max_gap_ms, self.launch_seconds)
        seconds = limit if streaming and self.scheduler.ready else None
        passes = (1 if streaming else self.platform.passes_in_a_row) - (reading if self.scheduler.ready else 0)
        for _ in range(passes):
            if self.prefilling.is_due(self.config.max_num_seqs, seconds):
                self.prefill(seconds)
        if not self.scheduler.ready:  # the next step may admit others before it reads on
            self.prefilling.settle(earlier)
            return
        default = FEWER_ROUNDS if any(r.find_stop for r in self.scheduler.ready) else MAX_ROUNDS
        num_rounds = min(num_rounds or self.config.rounds_per_launch or default, self.config.most_rounds)
        if self.prefilling.is_due(self.config.max_num_seqs, seconds):  # prompts must not wait for a long launch
            num_rounds = min(num_rounds, self.platform.rounds_per_chunk)
        decoding = self.prefilling.take_ready(participants)
        preempted = self.scheduler.grow(num_rounds) if decoding else []
        decoding = [r for r in decoding if r not in preempted]
        if decoding:  # no request is left if all were preempted for an older one in prefill
            # A request that has begun keeps its row: an older one that is read later takes the next free row.
            decoding.sort(key=lambda r: not r.output)
            decoding = decoding[: self.config.max_num_seqs + self.catalogue.spare[self.grown_shape(decoding)[0]]]
            participants += decoding
            with self.open_requests.blame(decoding):
                self.decode(decoding, num_rounds, streaming, limit if streaming else None)
        else:
            self.prefilling.settle()

    def admit(self) -> None:
        """Admit waiting requests, and write to the device what they need before their prompts are read."""
        admitted, copies = self.scheduler.admit()
        self.prefilling.write_grammars(admitted)
        self.prefilling.copy_pages(copies)
        for request in admitted:  # packed alone first, so that an error fails this request only
            with self.open_requests.blame([request], device=False):
                batch.check(request, self.layout, self.limits.vocab_size)

    def prefill(self, seconds: float | None = None) -> None:
        """Prefill the next tokens of the prompts in one pass. The draft reads them too if drafting is likely.

        seconds: limit of the pass's duration; None for none.
        """
        pages = self.grown_shape(self.scheduler.running)[1]
        # The draft's prefill pays only if speculation does. The draft can also read the prompt later.
        self.prefilling.prefill(pages, drafted=self.controller.likely_k > 0, seconds=seconds)

    def decode(self, requests: list[Request], num_rounds: int, streaming: bool, seconds: float | None = None) -> None:
        """Run one launch (many rounds) of these requests. Their prompts' prefill has ended or is queued before it.

        The next prefill pass is started before the host reads the launch's results, if other prompts fill it.

        seconds: limit of that pass's duration; None for none.
        """
        short = streaming or num_rounds < PROBE_ROUNDS
        kind = (self.grown_shape(requests)[0], short)  # a round takes longer in a short launch than in a long one
        # If sampling noise is drawn for each round, a seeded request's tokens depend on the number of draft tokens.
        pinned = any(r.params.seed is not None and RULES[r.rule].noise == "round" for r in requests)
        judged = requests[: None if pinned else self.config.max_num_seqs]
        rows = [(r.num_speculative_tokens, r.acceptance) for r in judged]
        limit = self.speculative.disable_by_batch_size if self.speculative else None
        if limit is not None and len(self.scheduler.running) >= limit and not pinned:
            rows = []
        choice = self.controller.choose(kind, rows, pinned=pinned)
        if streaming:
            first = any(not r.output for r in requests[: self.config.max_num_seqs])
            num_rounds = 1 if first else min(num_rounds, self.controller.rounds_within(SHOWN_EVERY, kind, choice.k))
        num_rounds = min(num_rounds, choice.num_rounds or num_rounds)
        catch_up_seconds = self.catch_up(requests) if choice.k else 0.0
        plan = self.launch(requests, choice.k, num_rounds, choice.worth)
        self.prefilling.settle()  # waits only now, so that the device prefilled while the host packed
        with self.timed("decode_seconds") as starting:
            started = self.runner.start(plan)
        if self.prefilling.follows(seconds, streaming=streaming):
            self.prefill(seconds)
        with self.timed("decode_seconds") as fetching:
            result = self.open_requests.fetch(requests, started)
        self.prefilling.waited(fetching.seconds)
        self.launch_seconds = starting.seconds + fetching.seconds
        rounds = int(result.num_rounds)
        tokens = int(np.sum(result.num_new))
        counted = rounds if result.num_new.size >= kind[0] else 0  # a smaller program's rounds are of no kind
        self.controller.observe(kind, plan.k, self.launch_seconds, counted, tokens=tokens, catch_up=catch_up_seconds)
        self.apply_result(requests, result, self.launch_seconds)

    def catch_up(self, requests: Sequence[Request]) -> float:
        """Prefill the draft if it trails the target too far for a request. Return the seconds that this took."""
        if not any(map(self.lag.too_far, requests)):
            return 0.0
        self.prefilling.settle()  # so that the time below does not include earlier passes
        before = self.timing.prefill_seconds
        self.prefilling.catch_up(requests, self.grown_shape(requests)[1])
        self.prefilling.settle()
        return self.timing.prefill_seconds - before

    def launch(self, requests: list[Request], k: int, num_rounds: int, worth: float = 0.0) -> Plan:
        """Return the plan (a device program and its arguments) of one launch over these requests."""
        needed = self.needed_shape(requests)
        program = self.catalogue.launch(k, self.grown_shape(requests), batch.variant(requests), needed)
        others_wait = bool(self.scheduler.waiting) or len(self.scheduler.running) > len(requests)
        inputs = batch.launch_input(
            requests,
            program.k,
            program.variant,
            self.layout,
            (program.rows, program.row_pages),
            spare=self.catalogue.spare[program.rows],
            num_rounds=num_rounds,
            max_ends=self.catalogue.most_ends(program, len(requests), needed[0], others_wait=others_wait),
            worth=worth,
            rule_options=self.speculative.rule_options if self.speculative else (),
            vocab_size=self.limits.vocab_size,
        )
        return Plan("launch", (inputs,), k=program.k, variant=program.variant)

    def grown_shape(self, requests: Sequence[Request]) -> tuple[int, int]:
        """Return (B, N) of the next launch: rows and block table's width, with room for all pages that rows may hold.

        A width for the rows' present pages only would soon need another program.
        """
        return self.catalogue.shape(*self.needed_shape(requests))

    def needed_shape(self, requests: Sequence[Request]) -> tuple[int, int]:
        """Return the number of rows that these requests take in a round, and the most pages that a row may hold."""
        return min(len(requests), self.config.max_num_seqs), max(map(self.scheduler.most_pages, requests))

    def apply_result(self, requests: Sequence[Request], result: LaunchResult, seconds: float = 0.0) -> None:
        """Apply a launch's tokens, lengths, counters and finish reasons to its requests. Release ended requests."""
        kept = [0] * len(requests)
        for row, request in enumerate(requests):
            with self.open_requests.blame([request], device=False):
                if request.finish_reason is None:  # a request aborted while the launch ran has a finish reason
                    kept[row] = results.absorb_row(request, row, result, self.lag)
        self.timing.num_tokens += sum(kept)
        results.keep_count(requests, kept, result, self.metrics, self.controller.overall, seconds)
        for request in requests:
            with self.open_requests.blame([request], device=False):
                if request.finish_reason != "error":
                    self.scheduler.register(request)
            if request.finish_reason:
                self.open_requests.remove(request)

    def abort(self, request: Request) -> None:
        """End a request (one sample) and free its pages. Do nothing if it has ended already."""
        self.open_requests.abort(request)

    def timed(self, field: str) -> stopwatch:
        return stopwatch(self.timing, field, self.runner.programs)
