"""jaxspec generate"""

from __future__ import annotations

import dataclasses
import enum
import json
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxspec.cli.shared import EMBEDDED, MODEL_HELP, AsJson
from jaxspec.progress import say

if TYPE_CHECKING:
    from jaxspec.config import SpeculativeConfig
    from jaxspec.llm import LLM
    from jaxspec.outputs import RequestOutput
    from jaxspec.sampling_params import SamplingParams


class Method(enum.StrEnum):
    ngram = "ngram"
    draft_model = "draft_model"
    both = "ngram+draft_model"
    none = "none"


def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", show_default=False)],
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = EMBEDDED,
    draft: Annotated[
        str | None, typer.Option(help="A smaller model of the same family that drafts; the embedded model has its own.")
    ] = None,
    method: Annotated[
        Method | None, typer.Option(help="Default: draft_model with --draft, both with the embedded pair, else ngram.")
    ] = None,
    k: Annotated[int | None, typer.Option("-k", "--num-speculative-tokens", help="Drafts a round; 4.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest output, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that hold this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least this likely relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Divide the logits of tokens in prompt or output; 1 is off.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtract this from the logits of tokens in the output.")
    ] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, once for each occurrence.")] = 0.0,
    n: Annotated[int, typer.Option("-n", help="Samples of each prompt.")] = 1,
    min_tokens: Annotated[int, typer.Option(help="Shortest output, in tokens.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the output; may be repeated.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of the tokens and of this many likeliest.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's message, put in the template.")] = False,
    as_json: AsJson = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the text when it is complete.")] = False,
) -> None:
    """Complete prompts. One prompt streams to the terminal."""
    from jaxspec.sampling_params import SamplingParams

    # Options are checked before the model is loaded.
    speculative = speculation(model, method, draft, k)
    if logprobs is not None and not as_json:
        raise ValueError(f"--logprobs {logprobs} is shown in the JSON document only: add --json")
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        seed=seed,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop or (),
        logprobs=logprobs,
    )
    from jaxspec.llm import LLM

    say(f"loading {model} ...")
    llm = LLM(model, speculative_config=speculative, max_num_seqs=min(len(prompts) * n, 16))
    inputs: list[Any] = [llm.render_chat([{"role": "user", "content": p}]) for p in prompts] if chat else list(prompts)
    if len(prompts) * n == 1 and not (as_json or no_stream):
        failed = stream(llm, inputs[0], params)
    else:
        failed = complete(llm, inputs, params, as_json)
    summarise(llm)
    if failed:
        say(f"jaxspec: {failed}")
        raise typer.Exit(2)


def complete(llm: LLM, prompts: list[Any], params: SamplingParams, as_json: bool) -> str | None:
    """Prints the outputs; what failed in them."""
    from jaxspec.job import failures

    with warnings.catch_warnings():  # said in the end instead
        warnings.simplefilter("ignore", RuntimeWarning)
        outputs = llm.generate(prompts, params)
    if as_json:
        print(json.dumps(as_document(outputs, llm)))
    else:
        for label, text in labelled(outputs):
            print(label + text)
    return failures(outputs)


def labelled(outputs: list[RequestOutput]) -> Iterator[tuple[str, str]]:
    """(label, text) of every sample: "[prompt.sample] ", of which only what tells them apart."""
    for i, output in enumerate(outputs):
        for completion in output.outputs:
            places = [i] * (len(outputs) > 1) + [completion.index] * (len(output.outputs) > 1)
            yield f"[{'.'.join(map(str, places))}] " if places else "", completion.text


def speculation(model: str, method: Method | None, draft: str | None, k: int | None) -> SpeculativeConfig | None:
    """The speculation that --method, --draft and -k ask for. Where they ask for nothing: prompt lookup, and a trained
    draft too where the model has one."""
    from checkpoints.sources import DRAFTS
    from jaxspec.config import SpeculativeConfig

    if method is Method.none:
        if draft is not None or k is not None:
            raise ValueError("--method none decodes plainly: leave --draft and -k out")
        return None
    if draft is None and method is not Method.ngram and model in DRAFTS:
        draft, method = DRAFTS[model], method or Method.both
    chosen: dict[str, Any] = {} if k is None else {"num_speculative_tokens": k}
    return SpeculativeConfig(method=None if method is None else str(method), model=draft, **chosen)


def stream(llm: LLM, prompt: Any, params: SamplingParams) -> str | None:
    """Prints the text as it comes; what failed."""
    error = None
    for piece in llm.stream(prompt, params):
        print(piece.text, end="", flush=True)
        error = piece.error
    print(flush=True)
    return error


def as_document(outputs: list[RequestOutput], llm: LLM) -> dict[str, Any]:
    """The JSON document of `generate`."""
    described = [dataclasses.asdict(output) | {"metrics": output.metrics.as_dict()} for output in outputs]
    return {"outputs": described, "timing": llm.timing.as_dict()}


def summarise(llm: LLM) -> None:
    timing, metrics = llm.timing, llm.metrics
    drafted = f", acceptance length {metrics.mean_acceptance_length:.2f}" if llm.engine.speculative else ""
    spent = f"loading {timing.load_seconds:.1f} s, compiling {timing.compile_seconds:.1f} s"
    say(f"{timing.num_tokens} tokens, {timing.tokens_per_second:.1f} tokens/s{drafted} ({spent} apart)")
