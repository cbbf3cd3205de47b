"""The command `jaxspec generate`."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxspec.cli.fields import CommandOption, Fields
from jaxspec.cli.shared import ENGINE, MODEL_HELP, AsJson, HostOptions, join
from jaxspec.cli.shared import OWN as SHARED
from jaxspec.cli.speculation import ConfigOption, DraftOption, DraftOptions, MethodOption, speculation
from jaxspec.common import embedded
from jaxspec.common.errors import UserError
from jaxspec.common.progress import write_line
from jaxspec.options.engine import EngineConfig
from jaxspec.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.api.llm import LLM
    from jaxspec.api.outputs import RequestOutput


SAMPLING = (
    *("max_tokens", "temperature", "seed", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "n", "min_tokens", "stop", "logprobs"),
)
MOST_ROWS = EngineConfig.max_num_seqs
OWN = SHARED | {
    "max_tokens": CommandOption(default=128),
    "n": CommandOption(flags=("-n",)),
    "stop": CommandOption(kind=list[str], default=None, help="A string that ends the output; may be repeated."),
    "logprobs": CommandOption(help="With --json: log-probabilities of the tokens and of this many most probable ids."),
    "max_num_seqs": CommandOption(
        default=None, help=f"Samples decoded together; as many as there are, up to {MOST_ROWS}."
    ),
}


def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", show_default=False)],
    *,
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = embedded.MODEL,
    draft: DraftOption = None,
    method: MethodOption = None,
    drafts: DraftOptions,
    speculative_config: ConfigOption = None,
    sampling: Annotated[dict[str, Any], Fields(SamplingParams, SAMPLING, OWN)],
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the chat template.")] = False,
    as_json: AsJson = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the text when it is complete.")] = False,
    engine: Annotated[dict[str, Any], Fields(EngineConfig, ENGINE, OWN)],
    hosts: HostOptions,
) -> None:
    """Complete prompts. One prompt streams to the terminal."""
    # The options are checked before the model is loaded.
    speculative = speculation(model, method, draft, drafts, speculative_config)
    if "logprobs" in sampling and not as_json:
        raise UserError(f"--logprobs {sampling['logprobs']} is shown in the JSON document only: add --json")
    params = SamplingParams(**sampling)
    options = EngineConfig(**{"max_num_seqs": min(len(prompts) * params.n, MOST_ROWS)} | engine)
    join(hosts)
    from jaxspec.api.llm import LLM

    write_line(f"loading {model} ...")
    llm = LLM(model, speculative_config=speculative, **dataclasses.asdict(options))
    inputs: list[Any] = list(prompts)
    if chat:
        inputs = [llm.render_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    if len(prompts) * params.n == 1 and not (as_json or no_stream):
        failed = stream(llm, inputs[0], params)
    else:
        failed = complete(llm, inputs, params, as_json)
    summarise(llm)
    if failed:
        raise UserError(failed)


def complete(llm: LLM, prompts: list[Any], params: SamplingParams, as_json: bool) -> str | None:
    """Print the outputs of all prompts. Return one message about those that failed, or None."""
    from jaxspec.api.completions import failures

    with warnings.catch_warnings():  # failed requests are reported at the end, not as warnings
        warnings.simplefilter("ignore", RuntimeWarning)
        outputs = llm.generate(prompts, params)
    if as_json:
        print(json.dumps(as_document(outputs, llm)))
    else:
        for label, text in labelled(outputs):
            print(label + text)
    return failures(outputs)


def labelled(outputs: list[RequestOutput]) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of every sample.

    A label is "[prompt.sample] ", with the indices of both. The prompt's index is left out if there is one prompt, the
    sample's if the prompt has one sample.
    """
    for i, output in enumerate(outputs):
        for completion in output.outputs:
            indices: list[str] = []
            if len(outputs) > 1:
                indices.append(str(i))
            if len(output.outputs) > 1:
                indices.append(str(completion.index))
            yield f"[{'.'.join(indices)}] " if indices else "", completion.text


def stream(llm: LLM, prompt: Any, params: SamplingParams) -> str | None:
    """Print the answer's text as it is generated. Return the message of a failure, or None."""
    error = None
    for piece in llm.stream(prompt, params):
        print(piece.text, end="", flush=True)
        error = piece.error
    print(flush=True)
    return error


def as_document(outputs: list[RequestOutput], llm: LLM) -> dict[str, Any]:
    """Return the JSON document of `jaxspec generate`."""
    described = [dataclasses.asdict(output) | {"metrics": output.metrics.as_dict()} for output in outputs]
    return {"outputs": described, "timing": llm.timing.as_dict()}


def summarise(llm: LLM) -> None:
    """Write the number of tokens, the speed, the acceptance length and the times of loading and compiling.

    The line goes to standard error.
    """
    timing, metrics = llm.timing, llm.metrics
    drafted = f", acceptance length {metrics.mean_acceptance_length:.2f}" if llm.engine.speculative else ""
    spent = f"loading {timing.load_seconds:.1f} s, compiling {timing.compile_seconds:.1f} s"
    write_line(f"{timing.num_tokens} tokens, {timing.tokens_per_second:.1f} tokens/s{drafted} ({spent} not counted)")
