"""The demo: plain and speculative decoding of the embedded model, with real weights, side by side."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.api.outputs import RequestOutput, whole
from jaxspec.common.embedded import MODEL
from jaxspec.common.plots import check_plot
from jaxspec.common.progress import write_line
from jaxspec.demo import beside_transformers, report
from jaxspec.demo.demo_options import DemoOptions
from jaxspec.drafters.methods import LOOKUP
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.models.draft_spec import draft_spec
from jaxspec.options.quantization import BLOCKS
from jaxspec.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.api.llm import LLM

NUM_SPECULATIVE_TOKENS = 4
# Values of K (draft tokens per round) that are tried with the draft alone. The fastest on this machine is shown.
DRAFT_CHOICES = (2, 3, 4)
TRIAL_TOKENS = 24  # largest number of tokens of each answer in that trial

RIVER = (
    "The Amazon river is 6,400 kilometres long. It rises in the Andes of Peru and flows east through Brazil to the "
    "Atlantic Ocean. About one fifth of all river water on Earth flows through the Amazon."
)
CODE = """def total_price(items, tax):
    price = 0
    for item in items:
        price += item.price * item.count
    return price * (1 + tax)"""
# User messages by title. Prompt lookup (drafts copied from the prompt) gains where the answer repeats the prompt, and
# nothing on an open question.
PROMPTS = {
    "repeat a text": f"Repeat this text exactly:\n\n{RIVER}",
    "fix spelling": "Fix the spelling mistakes in this text and change nothing else:\n\n"
    + RIVER.replace("kilometres", "kilometrs").replace("flows east", "flaws east"),
    "edit code": "Rename the variable `price` to `total` in this Python function. Reply with the code only.\n\n"
    f"```python\n{CODE}\n```",
    "open question": "What is the capital of France, and what is it known for? Answer in three sentences.",
}


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of decoding: an LLM, and the number of draft tokens per round that its requests ask for."""

    llm: LLM
    num_speculative_tokens: int


@dataclasses.dataclass
class Run:
    """The answer to one prompt by one method.

    seconds: wall time of the answer without compiling.
    """

    output: RequestOutput
    seconds: float

    @property
    def token_ids(self) -> list[int]:
        return self.output.outputs[0].token_ids


Runs = dict[str, list[Run]]  # for each method, its answers in the order of the prompts


def demo(options: DemoOptions, *, as_json: bool = False, plot: Path | None = None) -> None:
    """Run the demo and print tables or one JSON document. Progress goes to standard error."""
    if plot is not None:
        check_plot(plot)
    if options.compare_transformers:
        beside_transformers.check()
    document = measure(options)
    if as_json:
        print(json.dumps(document))
    else:
        report.show(document)
    if plot is not None:
        report.draw(document, plot)
        write_line(f"plot written to {plot}")


def sampling(max_tokens: int, num_speculative_tokens: int) -> SamplingParams:
    """Return greedy sampling parameters with this number of draft tokens per round."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, num_speculative_tokens=num_speculative_tokens)


def measure(options: DemoOptions) -> dict[str, Any]:
    """Answer every prompt with every method, one answer at a time, and return the JSON document.

    All methods share the target's weights.
    """
    from jaxspec.api.llm import LLM

    write_line(f"loading {MODEL} ...")
    # A batch of one row and a short context keep the page pool small.
    llm = LLM(
        MODEL,
        speculative_config=always(NUM_SPECULATIVE_TOKENS, method="ngram"),
        dtype=options.dtype,
        quantization=options.quantization,
        max_num_seqs=1,
        enable_prefix_caching=False,  # otherwise the second method would reuse the first method's prefill
        max_model_len=options.max_model_len,
    )
    prompts = {title: llm.render_chat([{"role": "user", "content": text}]) for title, text in PROMPTS.items()}
    form = None if options.quantization == BLOCKS else options.quantization  # the draft is not a GGUF file
    drafting = {"model": options.draft, "quantization": form}
    choices = draft_ways(llm, drafting)
    method = draft_spec(choices[NUM_SPECULATIVE_TOKENS].llm.engine.runner.configs["draft"]).method
    both = always(NUM_SPECULATIVE_TOKENS, method=LOOKUP + method, **drafting)
    ways = {
        "plain": Way(llm, 0),
        "ngram": Way(llm, NUM_SPECULATIVE_TOKENS),
        LOOKUP + method: Way(llm.speculating(both), NUM_SPECULATIVE_TOKENS),
    }
    write_line(f"loaded in {llm.timing.load_seconds:.1f} s; compiling ...")
    compiling = {name: warm_up(way, prompts, options.max_tokens) for name, way in ways.items()}
    compiling[method] = sum(warm_up(way, prompts, options.max_tokens) for way in choices.values())
    trials = trial(choices, prompts, min(options.max_tokens, TRIAL_TOKENS))
    write_line("draft, tokens/s by K: " + ", ".join(f"{k}: {speed:.1f}" for k, speed in trials.items()))
    ways[method] = choices[max(trials, key=trials.__getitem__)]
    ways = {name: ways[name] for name in ("plain", "ngram", method, LOOKUP + method)}
    write_line(f"compiled in {sum(compiling.values()):.1f} s; answering {len(prompts)} prompts, one at a time ...")
    runs = answers(ways, prompts, options.max_tokens)
    document = describe(ways, runs, compiling)
    peers = None
    if options.compare_transformers:
        write_line("answering with transformers ...")
        peers = beside_transformers.compare(
            llm, list(prompts.values()), options.max_tokens, [r.token_ids for r in runs["plain"]]
        )
    return document | {
        "draft": options.draft,
        "quantization": options.quantization,
        "draft_trials": {str(k): speed for k, speed in trials.items()},
        "transformers": peers,
    }


def always(k: int, **which: str | None) -> dict[str, Any]:
    """Return a speculative config with k draft tokens in every round, not with adaptive K.

    The table is to show where drafts do not pay, too.
    """
    return {**which, "num_speculative_tokens": k, "adaptive": False}


def draft_ways(llm: LLM, drafting: Mapping[str, str | None]) -> dict[int, Way]:
    """Return the ways of decoding with the draft alone, by K (draft tokens per round).

    drafting: the draft's fields of SpeculativeConfig.

    An engine is compiled for its K and for half of it, so one engine can serve two values of K.
    """
    ways: dict[int, Way] = {}
    for k in sorted(DRAFT_CHOICES, reverse=True):
        half = next((way for most, way in ways.items() if most // 2 == k), None)
        ways[k] = Way(half.llm if half else llm.speculating(always(k, **drafting)), k)
    return dict(sorted(ways.items()))


def trial(ways: dict[int, Way], prompts: dict[str, Any], max_tokens: int) -> dict[int, float]:
    """Return the tokens per second of each K over all prompts. The values of K take turns at every prompt."""
    runs: dict[int, list[Run]] = {k: [] for k in ways}
    for prompt in prompts.values():
        for k, way in ways.items():
            runs[k].append(answer(way, prompt, max_tokens))
    return {k: tokens_per_second(taken) for k, taken in runs.items()}


def tokens_per_second(runs: list[Run]) -> float:
    """Return the number of tokens of all runs, divided by their seconds."""
    return sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs)


def warm_up(way: Way, prompts: dict[str, Any], max_tokens: int) -> float:
    """Compile the programs for these prompts, by starting to answer each. Return the seconds spent on compiling."""
    before = way.llm.timing.compile_seconds
    for prompt in prompts.values():
        pieces = way.llm.stream(prompt, sampling(max_tokens, way.num_speculative_tokens))
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
    return way.llm.timing.compile_seconds - before


def answers(ways: dict[str, Way], prompts: dict[str, Any], max_tokens: int) -> Runs:
    """Answer every prompt with every method. The methods take turns at each prompt."""
    runs: Runs = {name: [] for name in ways}
    for title, prompt in prompts.items():
        for name, way in ways.items():
            runs[name].append(answer(way, prompt, max_tokens))
        write_line(f"  {title}: " + ", ".join(f"{name} {taken[-1].seconds:.1f} s" for name, taken in runs.items()))
    return runs


def answer(way: Way, prompt: Any, max_tokens: int) -> Run:
    """Answer one prompt and time the answer, without compiling."""
    timing = way.llm.timing
    params = sampling(max_tokens, way.num_speculative_tokens)
    compiled_before = timing.compile_seconds
    started = time.perf_counter()
    (output,) = whole(way.llm.generate([prompt], params, progress=False))
    seconds = time.perf_counter() - started
    return Run(output, seconds - (timing.compile_seconds - compiled_before))


def describe(ways: dict[str, Way], runs: Runs, compiling: dict[str, float]) -> dict[str, Any]:
    """Return the JSON document's entries on model, device, prompts and methods.

    compiling: seconds spent on compiling for each method.
    """
    from jaxspec.parallel.placement import device_name

    llm = ways["plain"].llm
    methods: dict[str, Any] = {}
    for name, taken in runs.items():
        methods[name] = {
            "tokens": sum(len(run.token_ids) for run in taken),
            "seconds": sum(run.seconds for run in taken),
            "tokens_per_second": tokens_per_second(taken),
            "compile_seconds": compiling[name],
            "tokens_per_second_per_prompt": [tokens_per_second([run]) for run in taken],
        }
        if k := ways[name].num_speculative_tokens:
            methods[name] |= speculation(taken, runs["plain"], k)
    return {
        "model": MODEL,
        "device": device_name(),
        "dtype": str(llm.target.dtype),
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
        "load_seconds": llm.timing.load_seconds,
        "prompts": list(PROMPTS.values()),
        "titles": list(PROMPTS),
        "answers": [run.output.outputs[0].text for run in runs["plain"]],
        "methods": methods,
    }


def speculation(taken: list[Run], plain: list[Run], k: int) -> dict[str, Any]:
    """Return a speculative method's entries: its counters, and where its answers differ from the plain ones.

    taken: the method's answers.
    """
    # An engine counts acceptance at positions up to its own K, which may be larger than this method's k.
    total = SpecDecodeMetrics()
    for run in taken:
        total += run.output.metrics
    differences = list(first_differences(taken, plain))
    return {
        "num_speculative_tokens": k,
        "mean_acceptance_length": total.mean_acceptance_length,
        "num_drafts": total.num_drafts,
        "num_accepted_tokens_per_pos": total.num_accepted_tokens_per_pos[:k],
        "mean_acceptance_length_per_prompt": [run.output.metrics.mean_acceptance_length for run in taken],
        "identical_to_plain": not differences,
        "differences": differences,
    }


def first_differences(taken: list[Run], plain: list[Run]) -> Iterator[dict[str, int]]:
    """Yield, for each answer that differs from the plain one, the prompt's index and the first differing position."""
    for prompt, (mine, other) in enumerate(zip(taken, plain, strict=True)):
        a = mine.token_ids
        b = other.token_ids
        if a != b:
            agree = [x == y for x, y in zip(a, b, strict=False)]
            position = agree.index(False) if False in agree else len(agree)
            yield {"prompt": prompt, "position": position}
