"""The command line: jaxspec demo | generate | bench | generate-data | train-draft | evaluate-draft | convert | info."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxspec.exits import keeping, leave, status
from jaxspec.parallel.absent import leave_out_absent_tpu
from jaxspec.progress import say

if TYPE_CHECKING:
    from jaxspec.config import SpeculativeConfig
    from jaxspec.llm import LLM
    from jaxspec.outputs import RequestOutput
    from jaxspec.sampling_params import SamplingParams

EMBEDDED, DRAFT = "smollm2-135m-instruct", "smollm2-135m-draft"
MODEL_HELP = "Hub id, local folder, .gguf file, or an embedded model's name."

app = typer.Typer(
    name="jaxspec",
    help="Lossless speculative decoding in one device program.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # prompts and file names may hold brackets
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


class Method(enum.StrEnum):
    ngram = "ngram"
    draft_model = "draft_model"
    both = "ngram+draft_model"
    none = "none"


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point; see exits.py for how a command ends."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # only its tokenizers are used: torch is not missed
    words = list(sys.argv[1:] if arguments is None else arguments)

    def run() -> None:
        command: Any = typer.main.get_command(app)
        with command.make_context("jaxspec", list(words)) as context:
            if "--help" not in words:
                leave_out_absent_tpu()
            command.invoke(context)

    leave(status(run), at_once=arguments is None)


@app.command()
def demo(
    max_tokens: Annotated[int, typer.Option(help="Longest answer to each prompt, in tokens.")] = 64,
    draft: Annotated[str, typer.Option(help="The draft; the trained one comes with jaxspec.")] = DRAFT,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; auto is what the device does best.")] = "auto",
    compare_transformers: Annotated[
        bool, typer.Option("--compare-transformers", help="Answer with transformers too (needs torch).")
    ] = False,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw acceptance and speed.")] = None,
) -> None:
    """Real weights: plain decoding, n-grams and a draft model side by side."""
    from jaxspec.demo.run import Options, demo

    options = Options(max_tokens=max_tokens, draft=draft, dtype=dtype, compare_transformers=compare_transformers)
    demo(options, as_json=as_json, plot=plot)


@app.command()
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


@app.command()
def bench(
    preset: Annotated[str | None, typer.Option(help="Random weights, public shapes: qwen3-8b+qwen3-0.6b.")] = None,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    draft: Annotated[str | None, typer.Option(help="The draft of --model; n-gram without one.")] = None,
    batch_size: Annotated[str, typer.Option(help="One or several: 1,16.")] = "1",
    context: Annotated[str, typer.Option(help="Tokens in the caches, one or several.")] = "512",
    k: Annotated[str, typer.Option("-k", "--k", "--num-speculative-tokens", help="One or several: 2,4,6.")] = "4",
    synthetic_acceptance_length: Annotated[
        str | None, typer.Option(help="Tokens a round, one or several; real acceptance without it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    stages: Annotated[str | None, typer.Option(help="Of target,draft,round,...; all but adaptive.")] = None,
    never_slower: Annotated[bool, typer.Option("--never-slower", help="Off, always K and adaptive K.")] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    kernels: Annotated[str | None, typer.Option(help="reference or pallas; the platform's best.")] = None,
    launches: Annotated[int, typer.Option(help="Timed launches a figure.")] = 12,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw speed and time per round.")] = None,
) -> None:
    """Time every stage beside what the device could do at best."""
    from jaxspec.bench import options

    lengths = synthetic_acceptance_length
    if preset is None and model is None:
        preset = "smollm2-135m"
    chosen = options.Options(
        preset=preset,
        model=model,
        draft=draft,
        batch_sizes=options.listed("--batch-size", batch_size),
        contexts=options.listed("--context", context, least=2),
        ks=options.listed("-k", k),
        lengths=() if lengths is None else options.listed("--synthetic-acceptance-length", lengths, float),
        dtype=dtype,
        stages=options.stages(stages, never_slower=never_slower, draft=bool(draft or (preset and "+" in preset))),
        temperature=temperature,
        kernels=kernels,
        launches=launches,
    )
    from jaxspec.bench.measure import bench

    bench(chosen, as_json=as_json, plot=plot)


@app.command()
def generate_data(
    target: Annotated[str, typer.Option(help="The model that writes. " + MODEL_HELP)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the shards; those that are there are kept.")],
    tokens: Annotated[int, typer.Option(help="Generate at least so many, prompts included.")] = 10_000_000,
    seed: Annotated[int, typer.Option(help="Of prompts and samples.")] = 0,
    length: Annotated[int, typer.Option(help="Longest sequence, prompt included, in tokens.")] = 512,
    shard_size: Annotated[int, typer.Option(help="Sequences of a shard.")] = 4096,
    mixture: Annotated[
        str | None,
        typer.Option(help="Shares of chat, story, code, summary, rewrite, list, translate, free, self: chat:2,self:1."),
    ] = None,
    temperatures: Annotated[str | None, typer.Option(help="Shares of temperatures; 0:0.5,0.7:0.4,1:0.1.")] = None,
    rows: Annotated[
        int | None, typer.Option(help="Sequences decoded together; 2048 on GPU, 512 on TPU, 16 on CPU.")
    ] = None,
    part: Annotated[
        str, typer.Option(metavar="I/N", help="The I-th of N processes, a device each, that fill the folder together.")
    ] = "1/1",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; auto is what the device does best.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Let a model write what a draft is trained on."""
    from jaxspec.train.data_options import MIXTURE, TEMPERATURES, DataOptions, part_of, shares
    from jaxspec.train.generate import engine_options, generate, kept

    options = DataOptions(
        tokens=tokens,
        seed=seed,
        length=length,
        shard_size=shard_size,
        mixture=MIXTURE if mixture is None else shares("--mixture", mixture),
        temperatures=TEMPERATURES if temperatures is None else shares("--temperatures", temperatures, float),
        rows=rows,
        part=part_of(part),
    )
    with keeping(lambda: kept(out)):
        import checkpoints
        from jaxspec.llm import LLM

        say(f"loading {target} ...")
        name = checkpoints.resolve(target).name
        written = generate(LLM(target, dtype=dtype, **engine_options(options)), out, options, target=name)
    if as_json:
        print(json.dumps(written))
    else:
        print(f"{written['sequences']} sequences, {written['tokens']} tokens in {written['shards']} shards: {out}")


@app.command()
def train_draft(
    data: Annotated[Path, typer.Option(help="The folder of training data that the target wrote.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it is then the draft's name.")],
    target: Annotated[str, typer.Option(help=MODEL_HELP)] = EMBEDDED,
    layers: Annotated[int | None, typer.Option(help="Of the draft; two.")] = None,
    width: Annotated[int | None, typer.Option(help="Of the draft; two thirds of the target's.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads; as many as fit the width.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key-value heads; as the target's where they divide.")] = None,
    mlp_width: Annotated[int | None, typer.Option(help="In proportion to the width.")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Ids that it can propose, the most frequent ones; at most 16384.")
    ] = None,
    rare_ids: Annotated[int | None, typer.Option(help="The rarest of them, by a narrower way; half.")] = None,
    rare_width: Annotated[int | None, typer.Option(help="Of that way; a quarter of the width.")] = None,
    init_from_target: Annotated[bool, typer.Option(help="Begin with the target's layers and embeddings.")] = True,
    init_from: Annotated[str | None, typer.Option(help="Begin with this draft, and train it further.")] = None,
    top_n: Annotated[
        int, typer.Option(help="Likeliest ids that the target teaches, found once; 0: all, in every step.")
    ] = 64,
    steps: Annotated[int, typer.Option(help="Steps of the optimiser.")] = 2000,
    minutes: Annotated[float | None, typer.Option(help="Make only as many steps as fit.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of a step.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
    accumulate: Annotated[int, typer.Option(help="Parts that a step's rows are computed in, for memory.")] = 1,
    loss: Annotated[str | None, typer.Option(help="Shares of kl, rkl and tv: kl:1,tv:1.")] = None,
    learning_rate: Annotated[float, typer.Option(help="At its highest; a cosine takes it to a hundredth.")] = 4e-3,
    warmup: Annotated[int, typer.Option(help="Steps until it is reached.")] = 100,
    weight_decay: Annotated[float, typer.Option(help="Of the layers' matrices.")] = 0.01,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradients.")] = 1.0,
    eval_every: Annotated[int, typer.Option(help="Steps between measurements and checkpoints.")] = 200,
    eval_prompts: Annotated[int, typer.Option(help="Held-out prompts of a measurement.")] = 32,
    eval_tokens: Annotated[int, typer.Option(help="Longest answer to each.")] = 64,
    k: Annotated[int, typer.Option("-k", "--num-speculative-tokens", help="Drafts a round when measuring.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the order of the data.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16; masters are float32.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run into --out was ended.")] = False,
) -> None:
    """Distil a draft for a target. --out then names it: jaxspec generate --model TARGET --draft OUT."""
    given = dict(locals())
    from jaxspec.train.options import DEFAULT_LOSS, TrainOptions

    names = {field.name for field in dataclasses.fields(TrainOptions)}
    chosen = {name: value for name, value in given.items() if name in names}
    options = TrainOptions(**chosen | {"loss": loss or DEFAULT_LOSS, "num_speculative_tokens": k})
    from jaxspec.train.loop import kept, train

    with keeping(lambda: kept(options)):
        print(train(options))


@app.command()
def evaluate_draft(
    target: Annotated[str, typer.Option(help=MODEL_HELP)],
    draft: Annotated[str, typer.Option(help="The draft to be measured.")],
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="What users say: {category: [text, ...]}; 64 texts that come along."),
    ] = None,
    k: Annotated[int, typer.Option("-k", "--num-speculative-tokens", help="Drafts a round.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Longest answer to each prompt, in tokens.")] = 128,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; auto is what the device does best.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """How many of a draft's tokens a model accepts, greedy and at temperature 0.7."""
    from jaxspec.train import evaluate

    texts = evaluate.read_prompts(prompts or evaluate.HELDOUT)  # before the loading
    say(f"loading {target} and {draft} ...")
    document = evaluate.evaluate(target, draft, texts, num_speculative_tokens=k, max_tokens=max_tokens, dtype=dtype)
    if as_json:
        print(json.dumps(document))
    else:
        evaluate.show(document)


@app.command()
def info(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    draft: Annotated[str | None, typer.Option(help="Tell whether this draft fits the model.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a model is and what it needs, without loading its weights."""
    from jaxspec import info

    document = info.describe(model, draft)
    if as_json:
        print(json.dumps(document))
    else:
        info.show(document)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help=MODEL_HELP)],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: as stored.")] = None,
) -> None:
    """Write a model as a self-contained orbax folder, which loads fastest."""
    from jaxspec.config import DTYPES, one_of

    if dtype is not None:
        one_of("--dtype", dtype, DTYPES[1:])
    import checkpoints

    say(f"converting {source} ...")
    print(checkpoints.convert(source, destination, dtype=dtype))


if __name__ == "__main__":
    main()
