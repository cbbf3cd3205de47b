"""The engine: requests come and go between launches of the device program. It sees token ids only."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.cache import budget
from jaxspec.cache.allocator import PageAllocator
from jaxspec.cache.pages import PagedKVCache, allocate, cache_layout, default_page_size
from jaxspec.config import EngineConfig, SpeculativeConfig
from jaxspec.decode.programs import Programs
from jaxspec.decode.state import FINISH_REASONS, DecodeConfig, LaunchResult
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.ngram import NGram
from jaxspec.engine import batch
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import Scheduler
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params
from jaxspec.models.layers import Backend
from jaxspec.models.paged import PagedModel
from jaxspec.outputs import SpecDecodeMetrics, Timing
from jaxspec.parallel.mesh import check_divides
from jaxspec.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Model:
    """A configuration with its loaded parameters."""

    config: ModelConfig
    params: Params


def fetch(result: LaunchResult) -> LaunchResult:
    """The one transfer from device to host of a launch."""
    return jax.device_get(result)


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
        self.max_model_len = config.max_model_len or target.config.max_model_len
        if self.max_model_len > target.config.max_model_len:
            raise ValueError(
                f"max_model_len={self.max_model_len} exceeds the model's own {target.config.max_model_len}"
            )
        self.vocab_size = target.config.vocab_size
        self.page_size = config.page_size or default_page_size(platform)
        backend = Backend(platform, mesh, config.kernels)
        models = {"target": target} | ({"draft": draft} if draft else {})
        for model in models.values():
            heads = {"num_heads": model.config.num_heads, "num_key_value_heads": model.config.num_kv_heads}
            block = model.config.merged["gate_up"]["gate"]
            mlp = {f"intermediate_size / {block}": model.config.mlp_width // block}
            check_divides(heads | mlp, mesh.size)
        layouts = self.layouts(models, platform)
        paged = {
            name: PagedModel(model.config, layouts[name], self.context(name, model.config), backend)
            for name, model in models.items()
        }
        self.params = {name: model.params for name, model in models.items()}
        self.cache = PagedKVCache(*(allocate(layout, mesh) for layout in layouts.values()))
        self.num_pages = layouts["target"].num_pages
        self.gather = platform == "cpu" or config.kernels == "reference"
        self.decoding = DecodeConfig(
            target=paged["target"],
            drafter=make_drafter(speculative, paged.get("draft")),
            greedy_draft=speculative is not None and speculative.draft_sample_method == "greedy",
        )
        self.programs = Programs(mesh)
        self.scheduler = Scheduler(
            PageAllocator(self.num_pages), self.page_size, config.max_num_seqs, self.decoding.num_speculative_tokens
        )
        self.metrics, self.timing = SpecDecodeMetrics(), Timing()
        self.ids = itertools.count()
        self.shape = (1, 1)  # (B, N) of launches since the engine was last idle

    def context(self, name: str, model: ModelConfig) -> int:
        """Longest context of the target or the draft."""
        own = self.speculative.max_model_len if name == "draft" and self.speculative else None
        return min(self.max_model_len, own or model.max_model_len, model.max_model_len)

    def layouts(self, models: dict[str, Model], platform: str) -> dict[str, Any]:
        """Cache layouts with as many pages for each model as memory allows."""
        config = self.config

        def layout(model: Model, pages: int) -> Any:
            dtype = model.params["embed"].dtype
            return cache_layout(model.config, page_size=self.page_size, num_pages=pages, dtype=dtype, platform=platform)

        pages = config.num_pages
        if pages is None:
            page_bytes = [layout(model, 1).page_bytes // self.mesh.size for model in models.values()]
            memory = budget.free_memory(
                self.mesh.devices.flat[0], config.memory_utilization, self.temporary_bytes(models)
            )
            most = config.max_num_seqs * -(-(self.max_model_len + 64) // self.page_size)
            pages = min(budget.num_pages(memory, *page_bytes), most)
        return {name: layout(model, pages) for name, model in models.items()}

    def temporary_bytes(self, models: dict[str, Model]) -> int:
        """An upper estimate of what the largest programs need beside weights and pages: a few copies of a round's
        logits in float32, and the activations of a prefill chunk."""
        drafts = self.speculative.num_speculative_tokens if self.speculative else 0
        logits = 6 * self.config.max_num_seqs * (drafts + 1) * self.vocab_size * 4
        widest = max(4 * m.config.mlp_width + 8 * m.config.width + 2 * m.config.qkv_width for m in models.values())
        return logits + self.config.max_num_seqs * self.config.prefill_chunk * widest * 4

    def add(self, prompt: Sequence[int], params: SamplingParams, *, stop_ids=(), bad_words=()) -> Request:
        """SHIM: n samples, bad_words kept only."""
        samples: list[Request] = []
        try:
            for index in range(params.n):
                request = self.add_one(prompt, params, stop_ids=stop_ids)
                request.index, request.samples, request.bad_words = index, samples, bad_words
                if params.n > 1:
                    request.seed = (request.seed + index) % 2**64
                samples.append(request)
        except ValueError:
            for request in samples:
                self.abort(request)
            raise
        return samples[0]

    def add_one(self, prompt: Sequence[int], params: SamplingParams, *, stop_ids=()) -> Request:
        self.check(prompt, params)
        wanted = self.decoding.num_speculative_tokens
        if params.num_speculative_tokens is not None:
            wanted = min(wanted, params.num_speculative_tokens)
        rule = self.speculative.rejection_sample_method if self.speculative else None
        request = Request(
            id=next(self.ids),
            prompt=list(prompt),
            params=params,
            seed=int(np.random.SeedSequence().generate_state(1, np.uint64)[0]) if params.seed is None else params.seed,
            coupled=params.seed is not None if rule is None else rule == "coupled",
            stop_ids=tuple(dict.fromkeys([*params.stop_token_ids, *(() if params.ignore_eos else stop_ids)])),
            max_len=min(len(prompt) + params.max_tokens, self.max_model_len),
            num_speculative_tokens=wanted,
        )
        self.scheduler.add(request)
        return request

    def check(self, prompt: Sequence[int], params: SamplingParams, bad_words=()) -> None:
        """Raises ValueError for a prompt or a request that cannot be served."""
        if not len(prompt):
            raise ValueError("the prompt is empty: give at least one token")
        if len(prompt) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, max_model_len={self.max_model_len} leaves no room for output: "
                "shorten it or raise max_model_len"
            )
        for kind, ids in (("token id", prompt), ("stop token id", params.stop_token_ids)):
            if bad := next((i for i in ids if not 0 <= i < self.vocab_size), None):
                raise ValueError(f"{kind} {bad} is outside the vocabulary 0..{self.vocab_size - 1}")
        wanted, most = params.num_speculative_tokens, self.decoding.num_speculative_tokens
        if wanted is not None and wanted > most and most:
            raise ValueError(f"num_speculative_tokens={wanted} of a request exceeds the engine's {most}")

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self, num_rounds: int | None = None) -> list[Request]:
        """Admits, prefills, launches once; returns the requests that ran, those that ended with a finish_reason."""
        if not self.scheduler.running:
            self.shape = (1, 1)
        if admitted := self.scheduler.admit():
            for request in admitted:
                request.times.admitted = time.perf_counter()
            self.prefill(admitted)
            for request in admitted:
                request.times.prefilled = time.perf_counter()
        running = list(self.scheduler.running)
        if not running:
            return []
        with self.timed("decode_seconds"):
            result = fetch(self.launch(running, num_rounds or self.config.rounds_per_launch))
        for row, request in enumerate(running):
            self.absorb(request, row, result)
            now = time.perf_counter()
            request.times.first_token = request.times.first_token or now
            if request.finish_reason:
                request.times.finished = now
                shim_logprobs(self, request)
        return running

    def grown_shape(self, requests: Sequence[Request]) -> tuple[int, int]:
        """(B, N) of the next launch. Both only grow while requests are running: a smaller shape, for the few rows that
        are left at the end, would cost more to compile than it saves. N is bucketed for the gather form, whose cost it
        is; where attention is a kernel it has one value."""
        rows = batch.power_of_two(len(requests))
        if self.gather:
            pages = batch.power_of_two(max(len(r.pages) for r in requests))
        else:
            pages = -(-(self.max_model_len + self.decoding.num_speculative_tokens) // self.page_size)
        self.shape = max(rows, self.shape[0]), max(pages, self.shape[1])
        return self.shape

    def prefill(self, requests: list[Request]) -> None:
        """Fills both caches with all but the last token of each request."""
        longest = max(r.num_tokens for r in requests) - 1
        sizes = {"num_pages": self.num_pages, "row_pages": self.grown_shape(self.scheduler.running)[1]}
        with self.timed("prefill_seconds"):
            for start in range(0, longest, self.config.prefill_chunk):
                chunk = batch.chunk_input(requests, start, longest=self.config.prefill_chunk, **sizes)
                self.cache = self.programs.run("prefill", self.decoding, self.params, self.cache, chunk)
            jax.block_until_ready(self.cache)
        for request in requests:
            request.draft_len = request.num_tokens - 1

    def launch(self, requests: list[Request], num_rounds: int) -> LaunchResult:
        """One launch of the device program over these requests."""
        rows, row_pages = self.grown_shape(requests)
        inputs = batch.launch_input(
            requests, rows=rows, num_pages=self.num_pages, page_size=self.page_size, row_pages=row_pages
        )
        config = dataclasses.replace(self.decoding, variant=batch.variant(requests))
        if not any(r.num_speculative_tokens for r in requests):
            config = dataclasses.replace(config, drafter=None)
        stop_early = bool(self.scheduler.waiting)
        self.cache, result = self.programs.run(
            "launch", config, self.params, self.cache, inputs, np.int32(num_rounds), np.bool_(stop_early)
        )
        return result

    def absorb(self, request: Request, row: int, result: LaunchResult) -> None:
        """Takes one row's result in: tokens, lengths, counters, the reason to end."""
        count = int(result.num_new[row])
        known = len(request.output)
        request.output += result.new_tokens[row, :count].tolist()
        request.draft_len = int(result.draft_len[row])
        request.finish_reason = FINISH_REASONS[int(result.finish[row])]
        if request.find_stop and (keep := request.find_stop(request.output, known)) is not None:
            count -= len(request.output) - keep
            del request.output[keep:]
            request.finish_reason = "stop"
        seen = counters(result, row, count)
        request.metrics += seen
        self.metrics += seen
        self.timing.num_tokens += count
        if request.finish_reason:
            self.scheduler.remove(request)

    def abort(self, request: Request) -> None:
        """Ends a request and frees its pages. Does nothing to one that has ended."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
            request.times.finished = time.perf_counter()
            self.scheduler.remove(request)

    def timed(self, field: str) -> Any:
        return stopwatch(self.timing, field, self.programs)


@dataclasses.dataclass
class stopwatch:
    """Adds the seconds spent inside to a field of timing, compiling apart."""

    timing: Timing
    field: str
    programs: Programs

    def __enter__(self) -> None:
        self.started, self.compiled = time.perf_counter(), self.programs.compile_seconds

    def __exit__(self, *_: Any) -> None:
        compiling = self.programs.compile_seconds - self.compiled
        self.timing.compile_seconds += compiling
        spent = time.perf_counter() - self.started - compiling
        setattr(self.timing, self.field, getattr(self.timing, self.field) + spent)


def counters(result: LaunchResult, row: int, kept: int) -> SpecDecodeMetrics:
    """What one row's rounds did, as far as its first `kept` tokens: what a stop string cut off counts for nothing."""
    emitted = result.emitted[row]
    start = np.cumsum(emitted) - emitted  # tokens before each round
    proposed = np.where(start < kept, result.proposed[row], 0)
    accepted = np.minimum(result.accepted[row], np.maximum(kept - start, 0))
    position = np.arange(result.num_speculative_tokens)
    return SpecDecodeMetrics(
        num_drafts=int(np.sum(proposed > 0)),
        num_draft_tokens=int(np.sum(proposed)),
        num_accepted_tokens_per_pos=np.sum(accepted[:, None] > position, axis=0).tolist(),
        num_emitted_tokens=kept,
    )


def shim_logprobs(engine: Engine, request: Request) -> None:
    from jaxspec.engine.request import TokenLogprobs
    from tests.models.forward import run  # type: ignore

    if request.params.logprobs is None and request.params.prompt_logprobs is None:
        return
    tokens, known = request.tokens, len(request.prompt)
    padded = np.zeros((1, -(-len(tokens) // 64) * 64), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = run(engine.decoding.target.config, engine.params["target"], padded, [padded.shape[1]])[0]
    table = np.asarray(jax.nn.log_softmax(logits))
    entries = []
    for at, token in enumerate(tokens[1:]):
        order, own = np.argsort(-table[at], kind="stable"), table[at, token]
        top = order[:20].tolist()
        entries.append(TokenLogprobs(float(own), int(np.sum(table[at] > own)) + 1, top, table[at, top].tolist()))
    request.prompt_logprobs, request.logprobs = entries[: known - 1], entries[known - 1 :]


def make_drafter(speculative: SpeculativeConfig | None, draft: PagedModel | None) -> Drafter | None:
    if speculative is None:
        return None
    k = speculative.num_speculative_tokens
    if speculative.method == "ngram":
        return NGram(k, speculative.prompt_lookup_min, speculative.prompt_lookup_max)
    if draft is None:
        raise ValueError(f"method={speculative.method!r} needs the draft's parameters")
    return DraftModel(k, draft)
