"""LLM: strings or token ids in, RequestOutput out."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import checkpoints
from jaxspec.api.chat import as_prompt, conversations, rendering
from jaxspec.api.completions import Job, failures
from jaxspec.api.outputs import RequestOutput, StreamOutput
from jaxspec.api.profiles import Profile
from jaxspec.api.prompts import Ask, Prompt, asks, named
from jaxspec.common.errors import UserError
from jaxspec.common.progress import compiling, generation_progress, wanted, warm_up_progress
from jaxspec.engine import warming
from jaxspec.engine.engine import Engine
from jaxspec.engine.metrics import SpecDecodeMetrics, Timing
from jaxspec.engine.request import Request
from jaxspec.loading.drafts import check_same_tokenizer, load_draft
from jaxspec.loading.placing import placed
from jaxspec.loading.resolved import ResolvedModel, asked_draft, resolved
from jaxspec.loading.weights import compute_dtype, laid, load
from jaxspec.loading.widened import load_widened
from jaxspec.models.backend import Backend
from jaxspec.models.model import Model
from jaxspec.options.engine import EngineConfig
from jaxspec.options.keywords import ChatOptions, EngineOptions
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.absent import leave_out_absent_tpu
from jaxspec.parallel.hosts import together
from jaxspec.runtime.compilation_cache import enable_compilation_cache
from jaxspec.runtime.programs import Programs
from jaxspec.runtime.stored import sources
from pallas_kernels.device import here

logger = logging.getLogger(__name__)


class LLM:
    """A target model, with speculation where speculative_config is given.

    Args:
      model: hub id, local folder (safetensors or orbax), .gguf file, or the name of an embedded model.
      speculative_config: a SpeculativeConfig or a dict of its options; None decodes plainly.
      options: those of EngineConfig (dtype, max_model_len, max_num_seqs, tensor_parallel_size, ...).

    In a job of several processes (jaxspec.join_hosts) it is made with the same arguments in each. Process 0 gets a
    model over the devices of all; in the others it does not return: they do what process 0 decides, and end with it.

    What else it holds (engine, target, stop_ids, observers) are parts that may change.

    Raises: UserError or OSError with one line that names what is wrong.

    Example:
      >>> llm = LLM("smollm2-135m-instruct", speculative_config={"method": "ngram"})  # doctest: +SKIP
      >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        started = time.perf_counter()
        self.config, speculative = EngineConfig(**options), SpeculativeConfig.of(speculative_config)
        self._kept = enable_compilation_cache() if self.config.compilation_cache else None
        leave_out_absent_tpu()
        with together(lambda: listed(model, self.config, speculative)) as self._peers:
            source = checkpoints.resolve(model, revision=self.config.revision)
            self._resolved = resolved(source)
            draft = asked_draft(speculative, self._resolved)
            self._placement = placed(draft, self.config, speculative)
            self.target = self._load()
            self.tokenizer = checkpoints.load_tokenizer(
                checkpoints.resolve(self.config.tokenizer, weights=False) if self.config.tokenizer else source
            )
            self.stop_ids = checkpoints.load_stop_ids(source, self.tokenizer)
            self._begin(speculative, draft, started)
            if self._peers:
                self._peers.agree({"its configuration": self.engine.runner.configs, "pages": self.engine.layout})
        if self._peers and self._peers.rank:
            self._peers.follow(self.engine.runner.execute)
            raise SystemExit  # process 0 is done: whatever comes next is for that one

    def _begin(self, speculative: SpeculativeConfig | None, draft: ResolvedModel | None, started: float) -> None:
        """Make the engine, and what belongs to one."""
        self.engine = Engine(
            self.target,
            self.config,
            placement=self._placement,
            speculative=speculative,
            draft=self._load_draft(draft, speculative) if draft and speculative else None,
            device=here(),
            programs=Programs(self._placement, self._kept and self._kept / "programs", compiling),
            peers=self._peers,
            timing=Timing(load_seconds=time.perf_counter() - started),
        )
        self.observers: list[Callable[[Request], None]] = []  # called with every sample that ended
        self._profile = Profile()
        self._request_ids = map(str, itertools.count())
        self._warming = warming.begin(self.engine, warm_up_progress, alone=self._peers is None)

    def _load(self) -> Model:
        backend = Backend(here(), self._placement, self.config.kernels)  # refuses before anything is loaded
        dtype = compute_dtype(self.config.dtype, backend.device)
        read = lambda: load(self._resolved, dtype, self._placement).stored_for(backend)
        if self._kept is None:
            return read()
        return load_widened(self._resolved, dtype, backend, self._placement, self._kept / "widened", read)

    def _load_draft(self, draft: ResolvedModel, speculative: SpeculativeConfig) -> Model:
        check_same_tokenizer(self._resolved.source, self.tokenizer, draft.source)
        device, placement = here(), self._placement.draft
        dtype = compute_dtype(speculative.dtype or self.config.dtype, device)
        return load_draft(draft, dtype, placement, self.target).stored_for(
            Backend(device, placement, self.config.kernels)
        )

    def speculating(self, speculative_config: SpeculativeConfig | Mapping[str, Any] | None) -> LLM:
        """Another LLM on the same target, whose weights the two share, that speculates in another way. Raises UserError
        where the devices are those of several processes."""
        if self._peers:
            raise UserError("several processes run one engine: start them anew with the other speculative_config")
        started, other, speculative = time.perf_counter(), copy.copy(self), SpeculativeConfig.of(speculative_config)
        draft = asked_draft(speculative, self._resolved)
        other._placement = placed(draft, self.config, speculative)
        if other._placement != self._placement:
            other.target = laid(self.target, other._placement)
        other._begin(speculative, draft, started)
        return other

    @property
    def metrics(self) -> SpecDecodeMetrics:
        """Counters over all requests."""
        return self.engine.metrics

    @property
    def timing(self) -> Timing:
        return self.engine.timing

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts: a string, a list of strings, a list of token-id lists, or {"prompt_token_ids": [...]}.

        sampling_params: one for all, or one a prompt. Outputs come in the order of the prompts. All prompts are checked
        before the first is queued; a bad one is named by its index. A completion that failed on the way has
        finish_reason "error" and says why in `error`; one warning tells how many did. progress: draws a bar where a
        person looks at standard error; use_tqdm is vLLM's name of it.
        """
        progress = wanted(progress, use_tqdm)
        asked = self._prepare(prompts, sampling_params)
        jobs: list[Job] = []
        try:
            self._submit_all(asked, jobs)
            self._finish([request for job in jobs for request in job.requests], progress=progress)
        finally:
            for job in jobs:  # on an exception, nothing stays behind
                self._abort(job)
        outputs = [job.output() for job in jobs]
        if said := failures(outputs):
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        return outputs

    def _finish(self, requests: Sequence[Request], *, progress: bool) -> None:
        """Steps until these requests have ended."""
        left = set(requests)
        with generation_progress(len(left), self.metrics, enabled=progress) as report:
            while left and self.engine.busy:
                left.difference_update(r for r in self._step() if r.finish_reason is not None)
                report(len(requests) - len(left))

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamOutput]:
        """Yields pieces of the completions as they are made: of one prompt or, decoded together, of several. What
        comes within a twentieth of a second may come as one piece.

        A piece says by prompt_index and sample whose it is. All prompts are checked at once, before the first piece.
        Dropping the iterator ends what has not ended.
        """
        return self._pieces(self._prepare(prompts, sampling_params))

    def _pieces(self, asked: Sequence[Ask]) -> Iterator[StreamOutput]:
        jobs: list[Job] = []
        try:
            self._submit_all(asked, jobs)  # not earlier: an iterator that never started frees nothing
            left = jobs
            while left:
                # Steps of other requests advance these too, so there may be something to show already.
                if fresh := [piece for job in left for piece in job.pieces()]:
                    left = [job for job in left if not job.streamed]
                    yield from fresh
                else:
                    self._step(streaming=True)
        finally:
            for job in jobs:
                self._abort(job)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        use_tqdm: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answers a conversation (a list of {"role", "content"}), or several, through the model's chat template.
        options: as of render_chat."""
        prompts = [self.render_chat(conversation, **options) for conversation in conversations(messages)]
        return self.generate(prompts, sampling_params, progress=progress, use_tqdm=use_tqdm)

    def render_chat(self, messages: Any, **options: Unpack[ChatOptions]) -> Mapping[str, Any]:
        """A conversation as a prompt of token ids. The template writes its own BOS; none is added.

        chat_template_kwargs: what the template reads besides, such as {"enable_thinking": False}.
        add_generation_prompt: whether the prompt opens an answer. Default: unless the final message is continued.
        continue_final_message: leaves the final message open, so that the output continues it.
        """
        return as_prompt(self.tokenizer, rendering(self.tokenizer, messages, **options).text())

    # What generate, stream and AsyncLLM are made of.

    def _prepare(self, prompts: Any, sampling_params: Any = None) -> list[Ask]:
        """Prompts as the engine takes them, all checked. Raises UserError for the first that it cannot serve."""
        asked = asks(self.tokenizer, prompts, sampling_params)
        for ask in asked:
            named(ask.index, self.engine.check, ask.ids, ask.params, ask.bad_words, self.stop_ids)
        return [dataclasses.replace(ask, request_id=next(self._request_ids)) for ask in asked]

    def _submit(self, ask: Ask) -> Job:
        """Queues a prompt's samples."""
        add = functools.partial(self.engine.add, stop_ids=self.stop_ids, bad_words=ask.bad_words)
        return Job(self.tokenizer, ask, named(ask.index, add, ask.ids, ask.params))

    def _submit_all(self, asked: Sequence[Ask], jobs: list[Job]) -> None:
        """Adds a job for each to `jobs`; where that is interrupted, nothing is queued that is not in there."""
        known = set(self.engine.roster.open)
        try:
            for ask in asked:
                jobs.append(self._submit(ask))
        except BaseException:
            known.update(request.id for job in jobs for request in job.requests)
            for request in [r for i, r in self.engine.roster.open.items() if i not in known]:
                self.engine.abort(request)
            raise

    def _step(self, *, streaming: bool = False) -> list[Request]:
        """One step of the engine: the requests, one a sample, that ran or ended."""
        ran = self.engine.step(streaming=streaming)
        self._tell(request for request in ran if request.finish_reason is not None)
        return ran

    def _abort(self, job: Job) -> None:
        """Ends the samples of a job that have not ended, and frees those that ended by no step's doing."""
        left = [request for request in job.requests if request.finish_reason is None]
        for request in job.requests:
            self.engine.abort(request)
        self._tell(left)

    def _tell(self, ended: Iterable[Request]) -> None:
        for request in ended:
            for observe in self.observers:
                try:
                    observe(request)
                except Exception:  # who looks on is not to end what he looks at
                    logger.exception("an observer failed, and missed a request")

    # Profiles

    def start_profile(self, folder: str | os.PathLike[str] | None = None) -> Path:
        """Begin a trace of host and devices for TensorBoard or Perfetto. Return the folder it will be written to.

        folder: by default a new one, named by the time, under the cache folder. Raises RuntimeError where a trace is
        being taken already.
        """
        return self._profile.start(folder)

    def stop_profile(self) -> Path:
        """Write the trace and return its folder. Raise RuntimeError where none was started."""
        return self._profile.stop()


def listed(model: str, config: EngineConfig, speculative: SpeculativeConfig | None) -> dict[str, Any]:
    """What every process of a job has to be given alike, by name."""
    drafts = dataclasses.asdict(speculative) if speculative else {}
    own = {f"speculative_config.{name}": value for name, value in drafts.items()}
    return {"model": model, **dataclasses.asdict(config), **own, "source code": sources()}
