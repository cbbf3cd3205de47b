"""LLM: a model that completes prompts (strings or token ids) and returns RequestOutputs."""

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
from jaxspec.api.agreed import listed
from jaxspec.api.chat import as_prompt, conversations, rendering
from jaxspec.api.completions import PromptRun, failures
from jaxspec.api.grammars import Grammars, built, with_schema
from jaxspec.api.outputs import RequestOutput, StreamOutput
from jaxspec.api.profiles import Profile
from jaxspec.api.prompts import Prompt, PromptRequest, named, prompt_requests
from jaxspec.common.errors import UserError
from jaxspec.common.progress import compiling, generation_progress, wanted, warm_up_progress
from jaxspec.engine import warming
from jaxspec.engine.engine import Engine
from jaxspec.engine.metrics import SpecDecodeMetrics, Timing
from jaxspec.engine.request import Request
from jaxspec.loading.dequantised import load_dequantised
from jaxspec.loading.draft_degree import placement_for
from jaxspec.loading.drafts import check_same_tokenizer, load_draft
from jaxspec.loading.resolved import ResolvedModel, asked_draft, resolved
from jaxspec.loading.weights import compute_dtype, load, resharded
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
from pallas_kernels.device import here

logger = logging.getLogger(__name__)


class LLM:
    """A target model, with speculation where speculative_config is given.

    Args:
      model: hub id, local folder (safetensors or orbax), .gguf file, or the name of a model that comes with jaxspec.
      speculative_config: a SpeculativeConfig or a dict of its options; None decodes without speculation.
      options: fields of EngineConfig (dtype, max_model_len, max_num_seqs, tensor_parallel_size, ...).

    In a job of several processes (jaxspec.join_hosts), make the LLM with the same arguments in each. In process 0 it
    uses all devices. In the other processes the constructor does not return: they follow process 0 to its end.

    Other attributes (engine, target, stop_ids, observers) are internal and may change.

    Raises: UserError or OSError, each with a message of one line.

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
        self.config = EngineConfig(**options)
        speculative = SpeculativeConfig.of(speculative_config)
        self._kept = enable_compilation_cache() if self.config.compilation_cache else None
        leave_out_absent_tpu()
        with together(lambda: listed(model, self.config, speculative)) as self._peers:
            source = checkpoints.resolve(model, revision=self.config.revision)
            self._resolved = resolved(source)
            draft = asked_draft(speculative, self._resolved)
            self._placement = placement_for(draft, self.config, speculative)
            self.target = self._load()
            self.tokenizer = checkpoints.load_tokenizer(
                checkpoints.resolve(self.config.tokenizer, weights=False) if self.config.tokenizer else source
            )
            self.stop_ids = checkpoints.load_stop_ids(source, self.tokenizer, self._resolved.config)
            self._grammars = Grammars(self.tokenizer, self.stop_ids, self._resolved.config.vocab_size, self._kept)
            self._begin(speculative, draft, started)
            if self._peers:
                self._peers.agree({"its configuration": self.engine.runner.configs, "pages": self.engine.layout})
        if self._peers and self._peers.rank:
            self._peers.follow(self.engine.runner.execute)
            raise SystemExit  # only process 0 runs the rest of the user's program

    def _begin(self, speculative: SpeculativeConfig | None, draft: ResolvedModel | None, started: float) -> None:
        """Make the engine and what `speculating` makes anew. started: time.perf_counter() at the start of loading."""
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
        self.observers: list[Callable[[Request], None]] = []  # functions to call with each sample that ended
        self._profile = Profile()
        self._request_ids = map(str, itertools.count())
        self._warming = warming.begin(self.engine, warm_up_progress, alone=self._peers is None)

    def _load(self) -> Model:
        """Load and return the target model."""
        backend = Backend(here(), self._placement, self.config.kernels)  # checks options, before weights are loaded
        dtype = compute_dtype(self.config.dtype, backend.device)
        form = self.config.quantization

        def read() -> Model:
            return load(self._resolved, dtype, self._placement, quantization=form).stored_for(backend)

        if self._kept is None or form:
            return read()
        return load_dequantised(self._resolved, dtype, backend, self._placement, self._kept / "dequantised", read)

    def _load_draft(self, draft: ResolvedModel, speculative: SpeculativeConfig) -> Model:
        check_same_tokenizer(self._resolved.source, self.tokenizer, draft.source)
        form, placement = speculative.quantization, self._placement.draft
        backend = Backend(here(), placement, self.config.kernels)
        dtype = compute_dtype(speculative.dtype or self.config.dtype, backend.device)
        return load_draft(draft, dtype, placement, self.target, quantization=form).stored_for(backend)

    def speculating(self, speculative_config: SpeculativeConfig | Mapping[str, Any] | None) -> LLM:
        """Return an LLM with this target and another speculative_config. Raise UserError in a job of processes."""
        if self._peers:
            raise UserError("several processes run one engine: restart them with the other speculative_config")
        started = time.perf_counter()
        other = copy.copy(self)
        speculative = SpeculativeConfig.of(speculative_config)
        draft = asked_draft(speculative, self._resolved)
        other._placement = placement_for(draft, self.config, speculative)
        if other._placement != self._placement:
            other.target = resharded(self.target, other._placement, self.config.kernels)
        other._begin(speculative, draft, started)
        return other

    @property
    def metrics(self) -> SpecDecodeMetrics:
        """Counters of drafts and tokens, summed over all requests."""
        return self.engine.metrics

    @property
    def timing(self) -> Timing:
        return self.engine.timing

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        schema: Any = None,
        progress: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: a string, a list of strings, a list of token-id lists, or {"prompt_token_ids": [...]}.

        sampling_params: one for all prompts, or a list with one for each.
        schema: JSON schema of all outputs, a dict or a pydantic model. Short for structured_outputs={"json": schema}.
        progress: whether to draw a progress bar if standard error is a terminal; use_tqdm is vLLM's name for this.

        Outputs have the order of the prompts. All prompts are checked before the first is queued; an error names the
        prompt's index. A completion that fails later has finish_reason "error", and the reason in `error`. One warning
        then gives the number of failures.
        """
        progress = wanted(progress, use_tqdm)
        asked = built(self._prepare(prompts, with_schema(sampling_params, schema)))
        runs: list[PromptRun] = []
        try:
            self._submit_all(asked, runs)
            self._finish([request for run in runs for request in run.requests], progress=progress)
        finally:
            for run in runs:  # removes the requests that an exception would leave in the engine
                self._abort(run)
        outputs = [run.output() for run in runs]
        if message := failures(outputs):
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return outputs

    def _finish(self, requests: Sequence[Request], *, progress: bool) -> None:
        """Run steps of the engine until these requests have ended."""
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
        """Yield pieces of the completions while they are generated. Several prompts are decoded together.

        A piece's prompt_index and sample identify its completion. A piece may hold all tokens that were generated in a
        twentieth of a second.

        This call checks all prompts. Reading the first piece queues them. Dropping the iterator ends the requests that
        have not ended.
        """
        return self._pieces(built(self._prepare(prompts, sampling_params)))

    def _pieces(self, asked: Sequence[PromptRequest]) -> Iterator[StreamOutput]:
        runs: list[PromptRun] = []
        try:
            self._submit_all(asked, runs)  # called once the iterator has started: `finally` is then certain to run
            left = runs
            while left:
                # There may be new pieces before a step here, because steps of other callers advance all requests.
                if fresh := [piece for run in left for piece in run.pieces()]:
                    left = [run for run in left if not run.streamed]
                    yield from fresh
                else:
                    self._step(streaming=True)
        finally:
            for run in runs:
                self._abort(run)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        schema: Any = None,
        progress: bool = True,
        use_tqdm: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Complete one conversation (a list of {"role", "content"}) or several. Options: see generate, render_chat."""
        prompts = [self.render_chat(conversation, **options) for conversation in conversations(messages)]
        return self.generate(prompts, sampling_params, schema=schema, progress=progress, use_tqdm=use_tqdm)

    def render_chat(self, messages: Any, **options: Unpack[ChatOptions]) -> Mapping[str, Any]:
        """Return a conversation as a prompt of token ids. No BOS is added, because the chat template writes its own.

        chat_template_kwargs: further variables of the template, such as {"enable_thinking": False}.
        add_generation_prompt: whether the prompt opens an answer at its end. Default: not continue_final_message.
        continue_final_message: whether the final message is left open, so that the output continues it.
        tools: tools that the template describes, a list of {"type": "function", "function": {...}}.
        """
        return as_prompt(self.tokenizer, rendering(self.tokenizer, messages, **options).text())

    # The following methods are shared by generate, stream and AsyncLLM.

    def _prepare(self, prompts: Any, sampling_params: Any = None) -> list[PromptRequest]:
        """Return the prompts as checked requests. Raise UserError for the first prompt that cannot be served."""
        asked = prompt_requests(self.tokenizer, prompts, sampling_params)
        for prompt in asked:
            named(prompt.index, self.engine.check, prompt.ids, prompt.params, prompt.bad_words, self.stop_ids)
        build, new_id = self._grammars.build, functools.partial(next, self._request_ids)
        return [dataclasses.replace(p, request_id=new_id(), automaton=build(p)) for p in asked]

    def _submit(self, prompt: PromptRequest) -> PromptRun:
        """Queue a prompt's samples in the engine, and return the run that collects their output."""
        grammar = prompt.built_automaton()
        add = functools.partial(self.engine.add, stop_ids=self.stop_ids, bad_words=prompt.bad_words, automaton=grammar)
        request = named(prompt.index, add, prompt.ids, prompt.params)
        return PromptRun(self.tokenizer, prompt, request, self.engine.runner.method)

    def _submit_all(self, asked: Sequence[PromptRequest], runs: list[PromptRun]) -> None:
        """Queue the prompts, and append a run of each to `runs`. After an error, only those with a run stay queued."""
        known = set(self.engine.open_requests.open)
        try:
            for prompt in asked:
                runs.append(self._submit(prompt))
        except BaseException:
            known.update(request.id for run in runs for request in run.requests)
            for request in [r for i, r in self.engine.open_requests.open.items() if i not in known]:
                self.engine.abort(request)
            raise

    def _step(self, *, streaming: bool = False) -> list[Request]:
        """Run one step of the engine. Return the requests (one for each sample) that took part or ended."""
        ran = self.engine.step(streaming=streaming)
        self._notify(request for request in ran if request.finish_reason is not None)
        return ran

    def _abort(self, run: PromptRun) -> None:
        """End the samples of a run that have not ended, and release those that ended outside a step of the engine."""
        left = [request for request in run.requests if request.finish_reason is None]
        for request in run.requests:
            self.engine.abort(request)
        self._notify(left)

    def _notify(self, ended: Iterable[Request]) -> None:
        """Call the observers with each of these requests, which have ended."""
        for request in ended:
            for observe in self.observers:
                try:
                    observe(request)
                except Exception:  # an observer's error must not end the requests of others
                    logger.exception("an observer failed, and missed a request")

    # The following methods take traces with JAX's profiler.

    def start_profile(self, folder: str | os.PathLike[str] | None = None) -> Path:
        """Begin a profiler trace of host and devices, for TensorBoard or Perfetto. Return the trace's folder.

        folder: by default a new one in jaxspec's cache folder. Raises: RuntimeError while another trace is taken.
        """
        return self._profile.start(folder)

    def stop_profile(self) -> Path:
        """Write the profiler trace and return its folder. Raise RuntimeError if no trace was started."""
        return self._profile.stop()
