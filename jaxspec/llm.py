"""LLM: strings or token ids in, RequestOutput out."""

from __future__ import annotations

import copy
import functools
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import checkpoints
from checkpoints.sources import cache_folder
from jaxspec.config import EngineConfig, SpeculativeConfig
from jaxspec.engine.engine import Engine, Model
from jaxspec.engine.request import Request, said
from jaxspec.errors import UserError
from jaxspec.job import Job, failures
from jaxspec.loading import check_same_tokenizer, compute_dtype, enable_compilation_cache, load, this_platform
from jaxspec.models.layers import Backend
from jaxspec.outputs import RequestOutput, SpecDecodeMetrics, StreamOutput, Timing
from jaxspec.parallel.absent import leave_out_absent_tpu
from jaxspec.parallel.mesh import make_mesh
from jaxspec.progress import generation_progress
from jaxspec.prompts import Ask, Prompt, asks, named
from jaxspec.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class LLM:
    """A target model, with speculation where speculative_config is given.

    Args:
      model: hub id, local folder (safetensors or orbax), .gguf file, or the name of an embedded model.
      speculative_config: a SpeculativeConfig or a dict of its options; None decodes plainly.
      options: those of EngineConfig (dtype, max_model_len, max_num_seqs, tensor_parallel_size, ...).

    Raises: UserError, UnsupportedError or FileNotFoundError with one line that names what is wrong.

    Example:
      >>> llm = LLM("smollm2-135m-instruct", speculative_config={"method": "ngram"})  # doctest: +SKIP
      >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))  # doctest: +SKIP
    """

    def __init__(
        self, model: str, *, speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        started = time.perf_counter()
        self.config, speculative = EngineConfig(**options), SpeculativeConfig.of(speculative_config)
        if self.config.compilation_cache:
            enable_compilation_cache()
        leave_out_absent_tpu()
        self.mesh = make_mesh(self.config.tensor_parallel_size)
        self.source = checkpoints.resolve(model, revision=self.config.revision)
        self.target = self.load(self.source, self.config.dtype)
        self.tokenizer = checkpoints.load_tokenizer(
            checkpoints.resolve(self.config.tokenizer, weights=False) if self.config.tokenizer else self.source
        )
        self.stop_ids = checkpoints.load_stop_ids(self.source, self.tokenizer)
        self.begin(speculative, started)

    def begin(self, speculative: SpeculativeConfig | None, started: float) -> None:
        """Makes the engine, and what belongs to one."""
        draft = None
        if speculative and speculative.model:
            source = checkpoints.resolve(speculative.model, revision=speculative.revision)
            check_same_tokenizer(self.source, self.tokenizer, source)
            draft = self.load(source, speculative.dtype or self.config.dtype, self.target)
        self.engine = Engine(
            self.target, self.config, mesh=self.mesh, speculative=speculative, draft=draft, platform=this_platform()
        )
        self.observers: list[Callable[[Request], None]] = []  # called with every sample that ended
        self.profile: Path | None = None  # the folder of the trace that is being taken
        self.engine.timing.load_seconds = time.perf_counter() - started

    def load(self, source: checkpoints.Source, dtype: str, target: Model | None = None) -> Model:
        backend = Backend(this_platform(), self.mesh, self.config.kernels)  # refuses before anything is loaded
        return load(source, compute_dtype(dtype, backend.platform), self.mesh, target).stored_for(backend)

    def speculating(self, speculative_config: SpeculativeConfig | Mapping[str, Any] | None) -> LLM:
        """Another LLM on the same target, whose weights the two share, that speculates in another way."""
        started, other = time.perf_counter(), copy.copy(self)
        other.begin(SpeculativeConfig.of(speculative_config), started)
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
    ) -> list[RequestOutput]:
        """Completes prompts: a string, a list of strings, a list of token-id lists, or {"prompt_token_ids": [...]}.

        sampling_params: one for all, or one a prompt. Outputs come in the order of the prompts. All prompts are checked
        before the first is queued; a bad one is named by its index. A completion that failed on the way has
        finish_reason "error" and says why in `error`; one warning tells how many did.
        """
        asked = self.prepare(prompts, sampling_params)
        jobs: list[Job] = []
        try:
            for ask in asked:
                jobs.append(self.submit(ask))
            self.finish([request for job in jobs for request in job.requests], progress=progress)
        finally:
            for job in jobs:  # on an exception, nothing stays behind
                self.abort(job)
        outputs = [job.output() for job in jobs]
        if said := failures(outputs):
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        return outputs

    def finish(self, requests: Sequence[Request], *, progress: bool) -> None:
        """Steps until these requests have ended."""
        left = set(requests)
        with generation_progress(len(left), self.metrics, enabled=progress) as report:
            while left and self.engine.busy:
                left.difference_update(r for r in self.step() if r.finish_reason is not None)
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
        return self.pieces(self.prepare(prompts, sampling_params))

    def pieces(self, asked: Sequence[Ask]) -> Iterator[StreamOutput]:
        jobs: list[Job] = []
        try:
            for ask in asked:  # not earlier: an iterator that never started frees nothing
                jobs.append(self.submit(ask))
            left = jobs
            while left:
                # Steps of other requests advance these too, so there may be something to show already.
                if fresh := [piece for job in left for piece in job.pieces()]:
                    left = [job for job in left if not job.streamed]
                    yield from fresh
                else:
                    self.step(streaming=True)
        finally:
            for job in jobs:
                self.abort(job)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation (a list of {"role", "content"}), or several, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.render_chat(c) for c in conversations], sampling_params, progress=progress)

    def render_chat(self, messages: Any) -> Mapping[str, Any]:
        """A conversation as a prompt of token ids. The template writes its own BOS; none is added."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError("this model has no chat template: use generate with a plain prompt")
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # the template is a program of the model's, and raises what it likes
            raise UserError(f"{messages!r:.80} does not fit the model's chat template: {said(error)}") from error
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    # What generate, stream and AsyncLLM are made of.

    def prepare(self, prompts: Any, sampling_params: Any = None) -> list[Ask]:
        """Prompts as the engine takes them, all checked. Raises UserError for the first that it cannot serve."""
        asked = asks(self.tokenizer, prompts, sampling_params)
        for ask in asked:
            named(ask.index, self.engine.check, ask.ids, ask.params, ask.bad_words, self.stop_ids)
        return asked

    def submit(self, ask: Ask) -> Job:
        """Queues a prompt's samples."""
        add = functools.partial(self.engine.add, stop_ids=self.stop_ids, bad_words=ask.bad_words)
        return Job(self.tokenizer, ask, named(ask.index, add, ask.ids, ask.params))

    def step(self, *, streaming: bool = False) -> list[Request]:
        """One step of the engine: the requests, one a sample, that ran or ended."""
        ran = self.engine.step(streaming=streaming)
        self.tell(request for request in ran if request.finish_reason is not None)
        return ran

    def abort(self, job: Job) -> None:
        """Ends the samples of a job that have not ended."""
        left = [request for request in job.requests if request.finish_reason is None]
        for request in left:
            self.engine.abort(request)
        self.tell(left)

    def tell(self, ended: Iterable[Request]) -> None:
        for request in ended:
            for observe in self.observers:
                try:
                    observe(request)
                except Exception:  # who looks on is not to end what he looks at
                    logger.exception("an observer failed, and missed a request")

    # Profiles

    def start_profile(self, folder: str | os.PathLike[str] | None = None) -> Path:
        """Begins a trace of host and devices for TensorBoard or Perfetto; returns the folder it will be written to.

        folder: by default a new one, named by the time, under the cache folder. Raises RuntimeError where a trace is
        being taken already.
        """
        if self.profile is not None:
            raise RuntimeError(f"a profile is being taken already, into {self.profile}: stop_profile() ends it")
        chosen = Path(folder) if folder else cache_folder() / "profiles" / time.strftime("%Y-%m-%d-%H-%M-%S")
        jax.profiler.start_trace(str(chosen))
        self.profile = chosen
        return chosen

    def stop_profile(self) -> Path:
        """Writes the trace; returns its folder. Raises RuntimeError where none was started."""
        if self.profile is None:
            raise RuntimeError("no profile is being taken: start_profile() begins one")
        folder, self.profile = self.profile, None
        jax.profiler.stop_trace()
        return folder


def generate(
    model: str, prompts: Prompt | Sequence[Prompt], *, assistant_model: str | None = None, **sampling: Any
) -> list[RequestOutput]:
    """The one-call form: loads `model`, speculates with `assistant_model` where given, completes the prompts.

    sampling: fields of SamplingParams, and `num_assistant_tokens` for K.
    """
    params = {name: value for name, value in sampling.items() if name != "num_assistant_tokens"}
    speculative: dict[str, Any] | None = None if assistant_model is None else {"model": assistant_model}
    if (k := sampling.get("num_assistant_tokens")) is not None:
        if speculative is None:
            raise UserError(f"num_assistant_tokens={k} needs assistant_model, the draft that proposes them")
        speculative["num_speculative_tokens"] = k
    checked = SamplingParams(**params)  # before the loading
    return LLM(model, speculative_config=speculative).generate(prompts, checked)
