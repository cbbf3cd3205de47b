"""The engine: requests come and go between launches of the device program. It sees token ids only."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.profiler import TraceAnnotation
from jax.sharding import Mesh

from jaxspec.cache.allocator import PageAllocator
from jaxspec.cache.pages import PagedKVCache, allocate
from jaxspec.config import MAX_ROUNDS, EngineConfig, SpeculativeConfig
from jaxspec.decode.packing import Packed
from jaxspec.decode.programs import Programs, Variants
from jaxspec.decode.state import FINISH_REASONS, NO_ID, NO_LAW, DecodeConfig, LaunchResult
from jaxspec.engine import batch, setup
from jaxspec.engine.account import counters, stopwatch
from jaxspec.engine.adaptive import PROBE_ROUNDS, Acceptance, Controller
from jaxspec.engine.request import Request, TokenLogprobs
from jaxspec.engine.scheduler import Scheduler
from jaxspec.engine.setup import Model
from jaxspec.models.decoder import Params
from jaxspec.models.storage import stored_for
from jaxspec.options import ids as checked_ids
from jaxspec.outputs import SpecDecodeMetrics, Timing
from jaxspec.sampling_params import SamplingParams

FEWER_ROUNDS = 16  # of a launch that the host may have to act on before all its rows have ended
SHOWN_EVERY = 1 / 20  # seconds: a stream's launch, so that its pieces come as if one by one
NO_ID_ALLOWED = (
    "no token id was allowed: allowed_token_ids, bad_words and min_tokens together forbid every one; relax one of them"
)
NO_NUMBERS = (
    "the target's logits were no numbers: its weights are damaged, or its dtype is too narrow for this text; check the "
    "file, or take dtype='float32'"
)
ERRORS = {NO_ID: NO_ID_ALLOWED, NO_LAW: NO_NUMBERS}


def fetch(result: Packed) -> Any:
    """The one transfer from device to host of a launch."""
    return jax.device_get(result).unpack()


class Engine:
    """Serves requests with a target and, where speculative is given, a drafter.

    draft: the draft model that method "draft_model" proposes with. platform: "cpu", "gpu" or "tpu".
    """

    def __init__(
        self,
        target: Model,
        config: EngineConfig,
        *,
        mesh: Mesh,
        speculative: SpeculativeConfig | None = None,
        draft: Model | None = None,
        platform: str = "cpu",
    ) -> None:
        self.config, self.speculative, self.mesh = config, speculative, mesh
        models = {"target": target} | ({"draft": draft} if draft else {})
        paged = setup.paged_models(models, config, speculative, mesh, platform)
        self.max_model_len, self.vocab_size = paged["target"].max_model_len, target.config.vocab_size
        self.backend, self.params = paged["target"].backend, dict[str, Params]()
        for name, model in models.items():
            self.use(name, model.params)
        self.layouts = [model.layout for model in paged.values()]
        self.page_size, self.num_pages = self.layouts[0].page_size, self.layouts[0].num_pages
        self.cache = self.empty_cache()
        self.has_draft_cache = draft is not None
        self.drafters = setup.drafters(speculative, paged.get("draft"))
        self.decoding = DecodeConfig(
            target=paged["target"],
            drafter=self.drafters[max(self.drafters)],
            greedy_draft=speculative is not None and speculative.draft_sample_method == "greedy",
        )
        self.programs, self.variants = Programs(mesh), Variants()
        self.scheduler = Scheduler(
            PageAllocator(self.num_pages),
            self.page_size,
            config.max_num_seqs,
            self.num_drafts,
            reuse=config.enable_prefix_caching,
        )
        self.open: dict[int, Request] = {}  # by id: what has not left yet, wherever it is
        self.midway = False  # in what leaves queues, pages or caches as nobody knows if it is interrupted
        self.stepping = False
        most = self.scheduler.pages_for(self.max_model_len + self.num_drafts)
        self.table_widths = setup.table_widths(platform, config.kernels, most, self.page_size)
        self.controller = Controller(
            tuple(self.drafters),
            adaptive=speculative is not None and speculative.adaptive,
            draft_cost=setup.draft_cost(models),
        )
        self.metrics, self.timing = self.no_counts(), Timing()
        self.ids = itertools.count()
        self.failed: list[Request] = []  # in this step, or ended in one that was interrupted
        self.shape = (1, 1)  # (B, N) of launches since the engine was last idle

    @property
    def num_drafts(self) -> int:
        """K, the most drafts of a round."""
        return max(self.drafters)

    def no_counts(self) -> SpecDecodeMetrics:
        return SpecDecodeMetrics(num_accepted_tokens_per_pos=[0] * self.num_drafts)

    def empty_cache(self) -> PagedKVCache:
        return PagedKVCache(*(allocate(layout, self.mesh) for layout in self.layouts))

    # Requests come.

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        stop_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> Request:
        """Queues the n samples of a request and returns the first, whose `samples` are all of them; nothing runs before
        the next step.

        stop_ids: the model's own end ids; bad_words: params.bad_words as ids. See `check` for what is refused.
        """
        self.check(prompt, params, bad_words, stop_ids)
        params = dataclasses.replace(params)  # the caller's own may change
        wanted = self.num_drafts
        if params.num_speculative_tokens is not None:
            wanted = min(wanted, params.num_speculative_tokens)
        rule = self.speculative.rejection_sample_method if self.speculative else None
        seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0]) if params.seed is None else params.seed
        prompt = list(checked_ids("token id", prompt))
        samples = [
            Request(
                id=next(self.ids),
                prompt=prompt,
                params=params,
                seed=sample_seed(seed, index),
                coupled=params.seed is not None if rule is None else rule == "coupled",
                stop_ids=tuple(dict.fromkeys([*params.stop_token_ids, *(() if params.ignore_eos else stop_ids)])),
                max_len=min(len(prompt) + params.max_tokens, self.max_model_len),
                num_speculative_tokens=wanted,
                bad_words=tuple(tuple(word) for word in bad_words),
                index=index,
                metrics=self.no_counts(),
                acceptance=Acceptance(self.num_drafts),
            )
            for index in range(params.n)
        ]
        for sample in samples:
            sample.samples = samples
        with self.whole():
            for sample in samples:
                self.scheduler.add(sample)
            self.open.update({sample.id: sample for sample in samples})
        return samples[0]

    def use(self, name: str, params: Params) -> None:
        """The model `name`, "target" or "draft", has these parameters from now on."""
        self.params[name] = stored_for(self.backend, copy.copy(params))

    def check(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        bad_words: Sequence[Sequence[int]] = (),
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Raises ValueError for a prompt or a request that cannot be served."""
        prompt, params = checked_ids("token id", prompt), dataclasses.replace(params)  # checks once more
        checked_ids("the model's own stop id", stop_ids)
        if not len(prompt):
            raise ValueError("the prompt is empty: give at least one token")
        if len(prompt) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, max_model_len={self.max_model_len} leaves no room for output: "
                "shorten it or raise max_model_len"
            )
        kinds: dict[str, Sequence[int]] = {
            "token id": prompt,
            "stop token id": params.stop_token_ids,
            "allowed token id": params.allowed_token_ids or (),
            "logit_bias id": [i for i, _ in params.logit_bias],
            "bad word's token id": [i for word in bad_words for i in checked_ids("bad word's token id", word)],
        }
        for kind, ids in kinds.items():
            if (bad := next((i for i in ids if not 0 <= i < self.vocab_size), None)) is not None:
                raise ValueError(f"{kind} {bad} is outside the vocabulary 0..{self.vocab_size - 1}")
        wanted, most = params.num_speculative_tokens, self.num_drafts
        if wanted is not None and wanted > most and most:
            raise ValueError(f"num_speculative_tokens={wanted} of a request exceeds the engine's {most}")
        self.scheduler.check(min(len(prompt) + params.max_tokens, self.max_model_len))

    @property
    def busy(self) -> bool:
        return bool(self.open)

    # A step.

    def step(self, num_rounds: int | None = None, *, streaming: bool = False) -> list[Request]:
        """Admits, prefills one chunk, launches once; returns the requests that took part, those that ended with a
        finish_reason. A pass that fails ends its requests with finish_reason "error" and raises nothing. streaming:
        somebody reads along, so that the launch is to be short.

        An interrupt may come anywhere; the next step then begins again with what is known to be whole.
        """
        if self.midway or any(leaf.is_deleted() for leaf in jax.tree.leaves(self.cache)):
            self.begin_again()
        try:
            with self.whole():
                self.stepping = True
                took_part = self.advance(num_rounds, streaming)
                for request in [r for r in self.open.values() if r.finish_reason]:  # whatever ended it
                    self.leave(request)
                failed, self.failed = self.failed, []
        finally:
            self.stepping = False
        return sorted({*took_part, *failed}, key=lambda r: r.id)

    def advance(self, num_rounds: int | None, streaming: bool) -> list[Request]:
        """What a step does; the requests that took part."""
        if not self.scheduler.running:
            self.shape = (1, 1)
        self.admit()
        took_part = [r for r in self.scheduler.running if not r.prefilled]
        with self.blame(took_part):
            self.prefill(took_part)
        ready = lambda: [r for r in self.scheduler.running if r.prefilled and r.finish_reason is None]
        while (running := list(self.scheduler.running)) and not ready():  # nobody waits for a launch
            with self.blame(running):
                self.prefill(running)
        decoding = ready()
        own = FEWER_ROUNDS if any(r.find_stop for r in decoding) else MAX_ROUNDS
        num_rounds = num_rounds or self.config.rounds_per_launch or own
        if len(decoding) < len(self.scheduler.running):  # those in prefill want their next chunk soon
            num_rounds = -(-num_rounds // 4)
        if decoding:
            preempted = self.scheduler.grow(num_rounds)
            decoding = [r for r in decoding if r not in preempted]
        if decoding:  # or all have given way to an older one in prefill
            with self.blame(decoding):
                self.decode(decoding, num_rounds, streaming)
        return [*took_part, *decoding]

    def admit(self) -> None:
        """Lets waiting requests in, and copies what samples of one prompt share in part. Each is packed by itself once:
        what no device takes must not spoil the others' launch."""
        admitted, copies = self.scheduler.admit()
        if copies:
            padding = [(0, self.num_pages)] * (batch.power_of_two(len(copies), 2) - len(copies))
            source, target = np.array(copies + padding, np.int32).T
            with self.blame(admitted):
                self.run("copy_pages", None, source, target)
                jax.block_until_ready(self.cache)  # what fails, fails here
        for request in admitted:
            with self.blame([request], device=False):
                batch.check(request, num_pages=self.num_pages, page_size=self.page_size)

    def prefill(self, requests: Sequence[Request]) -> None:
        """Fills both caches with the next chunk of each request. While others are decoding, all share one chunk's
        tokens, so that those do not wait long."""
        requests, longest = [r for r in requests if r.finish_reason is None], self.config.prefill_chunk
        if not requests:
            return
        if len(requests) < len(self.scheduler.running):
            longest = max(16, longest // batch.power_of_two(len(requests)))
        chunk, lengths = batch.chunk_input(
            requests,
            [r.target_len for r in requests],
            num_pages=self.num_pages,
            row_pages=self.grown_shape(self.scheduler.running)[1],
            longest=longest,
        )
        config = dataclasses.replace(self.decoding, variant=batch.prefill_variant(requests))
        with self.timed("prefill_seconds"), TraceAnnotation("prefill"):
            done = self.run("prefill", config, chunk)
            scores = fetch(done) if config.variant.logprobs is not None else None
            jax.block_until_ready(self.cache)
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            with self.blame([request], device=False):
                self.absorb_chunk(request, row, length, scores)

    def absorb_chunk(self, request: Request, row: int, length: int, scores: Any) -> None:
        if request.wants_prompt_logprobs:
            n = request.params.prompt_logprobs or 0
            request.prompt_logprobs[request.target_len :] = token_logprobs(scores, row, length, n)
        request.target_len += length
        request.draft_len = self.draft_len(request.target_len, request.target_len)
        self.scheduler.register(request)
        if request.prefilled:
            request.times.prefilled = request.times.prefilled or time.perf_counter()

    def draft_len(self, length: int, target_len: int) -> int:
        """Without a draft cache there is nothing that could lag behind; with one, its context may be shorter."""
        return min(length, self.decoding.position_limit) if self.has_draft_cache else target_len

    def decode(self, requests: list[Request], num_rounds: int, streaming: bool) -> None:
        """One launch over these requests, whose prompts are in the caches."""
        short = streaming or num_rounds < PROBE_ROUNDS
        kind = self.grown_shape(requests)[0], short  # which cost more a round
        rows = [(r.num_speculative_tokens, r.acceptance) for r in requests]
        # Tokens of the standard rule with a seed of its own depend on the number of drafts.
        pinned = any(r.params.seed is not None and not r.coupled and not r.params.greedy for r in requests)
        limit = self.speculative.disable_by_batch_size if self.speculative else None
        if limit is not None and len(self.scheduler.running) >= limit and not pinned:
            rows = []
        choice = self.controller.choose(kind, rows, pinned=pinned)
        if streaming:  # what is first is shown at once
            first = any(not r.output for r in requests)
            num_rounds = 1 if first else min(num_rounds, self.controller.rounds_within(SHOWN_EVERY, kind, choice.k))
        num_rounds = min(num_rounds, choice.num_rounds or num_rounds)
        with self.timed("prefill_seconds") as reading:
            if choice.k:
                self.catch_up(requests)
        with self.timed("decode_seconds") as watch, TraceAnnotation("launch"):
            result = fetch(self.launch(requests, choice.k, num_rounds, choice.worth))
        took = watch.seconds, int(result.num_rounds)
        tokens = int(np.sum(result.num_new))
        self.controller.observe(kind, choice.k, *took, tokens=tokens, catch_up=reading.seconds)
        self.absorb(requests, result)

    def catch_up(self, requests: list[Request]) -> None:
        """The draft reads what was decoded without it. A lag of one token is left to the loop's first draft pass."""
        limit = self.decoding.position_limit
        behind = lambda r: r.num_speculative_tokens and r.draft_len < r.num_tokens - 2 and r.num_tokens < limit
        while self.has_draft_cache and (rows := [r for r in requests if behind(r)]):
            chunk, lengths = batch.chunk_input(
                rows,
                [r.draft_len for r in rows],
                num_pages=self.num_pages,
                row_pages=self.grown_shape(requests)[1],
                longest=self.config.prefill_chunk,
            )
            with TraceAnnotation("catch_up"):
                self.run("catch_up", self.decoding, chunk)
                jax.block_until_ready(self.cache)
            for request, length in zip(rows, lengths, strict=True):
                request.draft_len += length

    def launch(self, requests: list[Request], k: int, num_rounds: int, worth: float = 0.0) -> Packed:
        """One launch of the device program over these requests; its LaunchResult."""
        rows, row_pages = self.grown_shape(requests)
        variant = self.variants.choose((k, rows, row_pages), batch.variant(requests))
        sizes = {"rows": rows, "num_pages": self.num_pages, "page_size": self.page_size, "row_pages": row_pages}
        inputs = batch.launch_input(requests, k, variant, **sizes)
        if k and self.speculative and self.speculative.synthetic_acceptance_rates:
            rates: Any = np.array(self.speculative.synthetic_acceptance_rates[:k], np.float32)
            inputs = dataclasses.replace(inputs, synthetic_rates=rates)
        config = dataclasses.replace(self.decoding, variant=variant, drafter=self.drafters[k])
        stop_early = bool(self.scheduler.waiting)
        return self.run("launch", config, inputs, np.int32(num_rounds), np.bool_(stop_early), np.float32(worth))

    def run(self, name: str, config: Any, *arrays: Any) -> Packed:
        """A program on the caches, which it is given and gives back."""
        self.cache, result = self.programs.run(name, config, self.params, self.cache, *arrays)
        return result

    def grown_shape(self, requests: Sequence[Request]) -> tuple[int, int]:
        """(B, N) of the next launch. Both only grow while requests are running: a smaller shape, for the few rows that
        are left at the end, would cost more to compile than it saves. N has room for what the rows may come to hold:
        for what they hold now it would soon be another program."""
        pages = self.table_width(max(map(self.scheduler.most_pages, requests)))
        self.shape = max(batch.power_of_two(len(requests)), self.shape[0]), max(pages, self.shape[1])
        return self.shape

    def table_width(self, num_pages: int) -> int:
        """The least that has room for so many pages of a row."""
        return next(width for width in self.table_widths if width >= num_pages)

    def absorb(self, requests: Sequence[Request], result: LaunchResult) -> None:
        """Takes a launch's result in: tokens, lengths, counters, reasons to end. What has ended leaves."""
        kept = [0] * len(requests)
        for row, request in enumerate(requests):
            with self.blame([request], device=False):
                if request.finish_reason is None:  # else it was given up while the launch ran
                    kept[row] = self.absorb_row(request, row, result)
        self.keep_count(requests, kept, result)
        for request in requests:
            with self.blame([request], device=False):
                if request.pages:
                    self.scheduler.register(request)
            if request.finish_reason:
                self.leave(request)

    def absorb_row(self, request: Request, row: int, result: LaunchResult) -> int:
        """The tokens that this launch added to the output; below 0 where a stop string took back earlier ones."""
        count, known, finish = int(result.num_new[row]), len(request.output), int(result.finish[row])
        output = request.output + result.new_tokens[row, :count].tolist()
        reason, error = FINISH_REASONS[finish], ERRORS.get(finish)
        if request.find_stop and (keep := request.find_stop(output, known)) is not None:
            count -= len(output) - keep
            reason, error = "stop", None
            del output[keep:]
        logprobs, asked = request.logprobs, request.params.logprobs
        if asked is not None:  # a stop string may have begun in an earlier launch
            logprobs = [*logprobs, *token_logprobs(result.logprobs, row, max(count, 0), asked)][: len(output)]
        target_len = len(request.prompt) + len(output) - 1
        draft_len = self.draft_len(min(int(result.draft_len[row]), target_len), target_len)
        # All or nothing: an interrupt cannot come within one call.
        vars(request).update(
            output=output,
            logprobs=logprobs,
            finish_reason=reason,
            error=error,
            target_len=target_len,
            draft_len=draft_len,
        )
        return count

    def keep_count(self, requests: Sequence[Request], kept: Sequence[int], result: LaunchResult) -> None:
        now, size = time.perf_counter(), result.num_speculative_tokens
        self.timing.num_tokens += sum(kept)
        for request, seen in zip(requests, counters(result, kept), strict=True):
            if request.output:
                request.times.first_token = request.times.first_token or now
            if request.finish_reason:
                request.times.finished = now
            request.metrics += seen
            self.metrics += seen
        drafted = [(row, r, k) for row, r in enumerate(requests) if (k := min(size, r.num_speculative_tokens))]
        rounds = [np.asarray(result.accepted)[row, result.emitted[row] > 0] for row, _, _ in drafted]
        for (_, request, k), accepted in zip(drafted, rounds, strict=True):
            request.acceptance.observe(accepted, k)
        for k in {k for _, _, k in drafted}:
            of_k = [accepted for (_, _, own), accepted in zip(drafted, rounds, strict=True) if own == k]
            self.controller.overall.observe(np.concatenate(of_k), k)

    # Requests go, sometimes early.

    def abort(self, request: Request) -> None:
        """Ends a request (one sample) and frees its pages. Does nothing to one that has ended."""
        if request.finish_reason is None:
            request.finish_reason, request.times.finished = "abort", time.perf_counter()
        if request.id not in self.open or self.stepping:  # a step lets go of what has ended
            return
        if self.midway:
            self.begin_again()
        else:
            with self.whole():
                self.leave(request)

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        request.error, request.finish_reason = error, reason
        request.times.finished = time.perf_counter()
        self.leave(request)

    def leave(self, request: Request) -> None:
        self.open.pop(request.id, None)
        self.scheduler.remove(request)

    # What goes wrong.

    @contextlib.contextmanager
    def blame(self, requests: Sequence[Request], *, device: bool = True) -> Iterator[None]:
        """What goes wrong inside ends these requests with an error that says why; the others go on. An interrupt ends
        nobody. device: it may have been on the device, and then nobody knows what is in the caches."""
        try:
            yield
        except Exception as error:
            said = " ".join(str(error).split())
            for request in requests:
                if request.finish_reason is None:
                    self.end(request, "error", f"{type(error).__name__}: {said}")
                    self.failed.append(request)
            if device:
                self.lose_caches()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """What is done inside is done wholly, or undone by `begin_again`."""
        outer, self.midway = self.midway, True
        yield
        self.midway = outer

    def begin_again(self) -> None:
        """After an interrupt: queues, pages and caches may be in any state, tokens are whole."""
        self.lose_caches()
        self.midway = False

    def lose_caches(self) -> None:
        """Empty pages, and all requests wait: what they have said stays, and is computed again."""
        ended = [r for r in self.open.values() if r.finish_reason]
        self.failed += [r for r in ended if r not in self.failed]
        for request in ended:
            request.pages = []
            self.open.pop(request.id, None)
        self.scheduler.reset(self.open.values())
        for leaf in jax.tree.leaves(self.cache):
            if not leaf.is_deleted():
                leaf.delete()  # before new pages take the same space
        self.cache = self.empty_cache()

    def timed(self, field: str) -> stopwatch:
        return stopwatch(self.timing, field, self.programs)


def sample_seed(seed: int, index: int) -> int:
    """Of the index-th sample; the first one's is the request's own."""
    return int(np.random.SeedSequence([seed % (1 << 64), index]).generate_state(1, np.uint64)[0]) if index else seed


def token_logprobs(scores: Any, row: int, count: int, n: int) -> list[TokenLogprobs]:
    """The first `count` of a row, with their n likeliest ids."""
    arrays = (scores.chosen, scores.rank, scores.top_ids[..., :n], scores.top[..., :n])
    return [TokenLogprobs(*values) for values in zip(*(x[row, :count].tolist() for x in arrays), strict=True)]
