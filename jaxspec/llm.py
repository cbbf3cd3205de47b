"""LLM: strings or token ids in, RequestOutput out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import checkpoints
from checkpoints.sources import cache_folder
from jaxspec.config import EngineConfig, SpeculativeConfig
from jaxspec.detokenizer import Detokenizer
from jaxspec.engine.engine import Engine, Model
from jaxspec.engine.request import Request
from jaxspec.models.decoder import abstract_params
from jaxspec.outputs import CompletionOutput, RequestOutput, SpecDecodeMetrics, StreamOutput, Timing
from jaxspec.parallel.mesh import make_mesh
from jaxspec.progress import generation_progress
from jaxspec.sampling_params import SamplingParams

PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}
Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A target model, with speculation where speculative_config is given.

    Args:
      model: hub id, local folder (safetensors or orbax), .gguf file, or the name of an embedded model.
      speculative_config: a SpeculativeConfig or a dict of its options; None decodes plainly.
      options: those of EngineConfig (dtype, max_model_len, max_num_seqs, tensor_parallel_size, ...).

    Raises: ValueError, NotImplementedError or FileNotFoundError with one line that names what is wrong.

    Example:
      >>> llm = LLM("smollm2-135m-instruct", speculative_config={"method": "ngram"})  # doctest: +SKIP
      >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))  # doctest: +SKIP
    """

    def __init__(
        self, model: str, *, speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        started = time.perf_counter()
        config, speculative = EngineConfig(**options), SpeculativeConfig.of(speculative_config)
        platform = PLATFORMS[jax.default_backend()]
        if config.compilation_cache:
            enable_compilation_cache()
        mesh = make_mesh(config.tensor_parallel_size)
        source = checkpoints.resolve(model, revision=config.revision)
        target = load(source, compute_dtype(config.dtype, platform), mesh)
        self.tokenizer = checkpoints.load_tokenizer(
            checkpoints.resolve(config.tokenizer, weights=False) if config.tokenizer else source
        )
        self.stop_ids = checkpoints.load_stop_ids(source, self.tokenizer)
        draft = None
        if speculative and speculative.model:
            draft_source = checkpoints.resolve(speculative.model, revision=speculative.revision)
            check_same_tokenizer(source, self.tokenizer, draft_source)
            draft = load(draft_source, compute_dtype(speculative.dtype or config.dtype, platform), mesh)
        self.engine = Engine(target, config, mesh=mesh, speculative=speculative, draft=draft, platform=platform)
        self.engine.timing.load_seconds = time.perf_counter() - started

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
        before the first is queued; a bad one is named by its index.
        """
        listed = as_list(prompts)
        params = spread(sampling_params, len(listed))
        encoded = [self.encode(prompt, i) for i, prompt in enumerate(listed)]
        for i, (ids, p) in enumerate(zip(encoded, params, strict=True)):
            named(i, self.engine.check, ids, p)
        jobs: list[Job] = []
        try:
            for i, (ids, p) in enumerate(zip(encoded, params, strict=True)):
                jobs.append(named(i, Job, self, listed[i], ids, p))
            with generation_progress(len(jobs), enabled=progress) as report:
                while any(job.request.finish_reason is None for job in jobs):
                    self.engine.step()
                    report(jobs, self.metrics)
        finally:
            for job in jobs:  # on an exception, nothing stays behind
                self.engine.abort(job.request)
        return [job.output() for job in jobs]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamOutput]:
        """Yields pieces of one prompt's completion as rounds end. Dropping the iterator ends the request."""
        listed = as_list(prompt)
        if len(listed) != 1:
            raise ValueError(f"stream takes one prompt, got {len(listed)}: use generate for several")
        params = spread(sampling_params, 1)[0]
        ids = self.encode(listed[0], 0)
        named(0, self.engine.check, ids, params)
        return self.pieces(listed[0], ids, params)

    def pieces(self, prompt: Prompt, ids: list[int], params: SamplingParams) -> Iterator[StreamOutput]:
        job = named(0, Job, self, prompt, ids, params)  # not earlier: an iterator that never started frees nothing
        request, shown, sent, ended = job.request, 0, 0, False
        try:
            while not ended:
                # Steps of other requests advance this one too, so there may be something to show already.
                if request.finish_reason is None and len(request.output) == sent:
                    self.engine.step(num_rounds=1)
                    continue
                ended = request.finish_reason is not None
                text, new = job.text_so_far(), request.output[sent:]
                piece = StreamOutput(text[shown:], new, request.finish_reason)
                shown, sent = len(text), len(request.output)
                yield piece
        finally:
            self.engine.abort(request)

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
            raise ValueError("this model has no chat template: use generate with a plain prompt")
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def encode(self, prompt: Prompt, index: int) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        ids: Any = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if ids is None and isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
            return self.encode(prompt["prompt"], index)
        if not isinstance(ids, Iterable) or isinstance(ids, Mapping):
            raise ValueError(
                f"prompt {index}: {prompt!r:.80} is no prompt: give a string, a list of token ids, or a dict with "
                "'prompt_token_ids' or 'prompt'"
            )
        ids = list(ids)
        if not all(hasattr(i, "__index__") for i in ids):
            raise ValueError(f"prompt {index}: token ids must be whole numbers, got {ids!s:.80}")
        return [int(i) for i in ids]


class Job:
    """One prompt on its way through the engine, with its text."""

    def __init__(self, llm: LLM, prompt: Prompt, ids: list[int], params: SamplingParams) -> None:
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        self.prompt = text if isinstance(text, str) else None
        self.params = params
        self.detokenizer = Detokenizer(
            llm.tokenizer, stop=tuple(params.stop), skip_special_tokens=params.skip_special_tokens
        )
        find_stop = self.detokenizer.find_stop if params.stop else None
        self.request: Request = llm.engine.add(ids, params, stop_ids=llm.stop_ids, find_stop=find_stop)
        if not params.include_stop_str_in_output:
            self.detokenizer.hidden = frozenset(self.request.stop_ids)

    def text_so_far(self) -> str:
        """Text that will not change any more."""
        if self.request.finish_reason is not None:
            return self.detokenizer.finish(self.request.output, include_stop=self.params.include_stop_str_in_output)
        if not self.params.stop:
            self.detokenizer.feed(self.request.output)
        return self.detokenizer.text[: self.detokenizer.settled()]

    def output(self) -> RequestOutput:
        request = self.request
        stopped_by: str | int | None = self.detokenizer.stop_string
        if stopped_by is None and request.finish_reason == "stop":
            stopped_by = request.output[-1]
        completion = CompletionOutput(0, self.text_so_far(), request.output, request.finish_reason, stopped_by)
        return RequestOutput(request.id, self.prompt, request.prompt, [completion], request.metrics)


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
            raise ValueError(f"num_assistant_tokens={k} needs assistant_model, the draft that proposes them")
        speculative["num_speculative_tokens"] = k
    checked = SamplingParams(**params)  # before the loading
    return LLM(model, speculative_config=speculative).generate(prompts, checked)


def as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many as a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"{prompts!r:.80} is no prompt: give a string, a list of strings or lists of token ids")
    prompts = list(prompts)
    return [prompts] if prompts and all(hasattr(p, "__index__") for p in prompts) else prompts


def spread(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams a prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(f"sampling_params={params!r:.80}: give a SamplingParams, or a list with one for each prompt")
    if len(params) != count:
        raise ValueError(f"{len(params)} SamplingParams for {count} prompts: give one for all, or one each")
    return list(params)


def named(index: int, call: Any, *args: Any) -> Any:
    """call(*args), with the prompt's index in front of what it refuses."""
    try:
        return call(*args)
    except ValueError as error:
        raise ValueError(f"prompt {index}: {error}") from error


def compute_dtype(name: str, platform: str) -> Any:
    return jnp.dtype(("float32" if platform == "cpu" else "bfloat16") if name == "auto" else name)


def load(source: Any, dtype: Any, mesh: Any) -> Model:
    config = checkpoints.load_config(source)
    return Model(config, checkpoints.load_params(source, config, abstract_params(config, dtype, mesh)))


def check_same_tokenizer(source: Any, tokenizer: Any, draft_source: Any) -> None:
    """A draft must mean the same by an id. Vocabularies padded to different sizes are fine."""
    mine, theirs = tokenizer.get_vocab(), checkpoints.load_tokenizer(draft_source).get_vocab()
    if mine != theirs:
        tokens = mine.keys() | theirs.keys()
        differing = sum(mine.get(token) != theirs.get(token) for token in tokens)
        raise ValueError(
            f"the draft {draft_source.name!r} has another tokenizer than the target {source.name!r} "
            f"({differing} of {len(tokens)} tokens differ): choose a draft of the same family"
        )


def enable_compilation_cache() -> None:
    """Compiled programs are kept under the user's cache folder, unless JAX was told another place."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
