"""The demo: real weights, plain decoding and speculation side by side on the same engine."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.outputs import RequestOutput, SpecDecodeMetrics
from jaxspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.llm import LLM

MODEL = "smollm2-135m-instruct"  # embedded: its weights come out of a package, no hub is asked
NUM_SPECULATIVE_TOKENS = 4
MAX_TOKENS = 64
METHODS = {"plain": 0, "ngram": NUM_SPECULATIVE_TOKENS}  # name -> drafts a round

RIVER = (
    "The Amazon river is 6,400 kilometres long. It rises in the Andes of Peru and flows east through Brazil to the "
    "Atlantic Ocean. About one fifth of all river water on Earth flows through the Amazon."
)
CODE = """def total_price(items, tax):
    price = 0
    for item in items:
        price += item.price * item.count
    return price * (1 + tax)"""
# Title -> what the user says. Repeating and editing is where prompt lookup shines; open questions are where it cannot.
PROMPTS = {
    "repeat a text": f"Repeat this text exactly:\n\n{RIVER}",
    "fix spelling": "Fix the spelling mistakes in this text and change nothing else:\n\n"
    + RIVER.replace("kilometres", "kilometrs").replace("flows east", "flaws east"),
    "edit code": "Rename the variable `price` to `total` in this Python function. Reply with the code only.\n\n"
    f"```python\n{CODE}\n```",
    "open question": "What is the capital of France, and what is it known for? Answer in three sentences.",
}


@dataclasses.dataclass
class Run:
    """One prompt's answer by one method. seconds: prefill and decoding, compiling left out."""

    output: RequestOutput
    seconds: float

    @property
    def token_ids(self) -> list[int]:
        return self.output.outputs[0].token_ids


def demo(max_tokens: int = MAX_TOKENS, *, as_json: bool = False, plot: Path | None = None) -> None:
    """Runs the demo and prints it: tables, or one JSON document. Progress goes to standard error."""
    params = {name: sampling(max_tokens, k) for name, k in METHODS.items()}  # refuses a bad value before the loading
    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"--plot {plot}: the picture is a PNG, give a name that ends in .png")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise FileNotFoundError(f"--plot {plot}: the folder {plot.absolute().parent} does not exist: make it first")
    document = measure(params)
    if as_json:
        print(json.dumps(document))
    else:
        show(document)
    if plot is not None:
        draw(document, plot)
        say(f"plot written to {plot}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def sampling(max_tokens: int, num_speculative_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, num_speculative_tokens=num_speculative_tokens)


def measure(params: dict[str, SamplingParams]) -> dict[str, Any]:
    """Answers every prompt with every method, one at a time. Plain decoding is K = 0 of the same engine, so the two
    share weights and cache."""
    from jaxspec.llm import LLM

    say(f"loading {MODEL} ...")
    # One row and a short context: the pool holds what the demo needs and no more.
    llm = LLM(
        MODEL,
        # Always K drafts: the table shows where they pay and where they do not.
        speculative_config={"method": "ngram", "num_speculative_tokens": NUM_SPECULATIVE_TOKENS, "adaptive": False},
        max_num_seqs=1,
        enable_prefix_caching=False,  # or the second method would find the first one's prompt
        max_model_len=min(2048, 256 + next(iter(params.values())).max_tokens),
    )
    prompts = {title: llm.render_chat([{"role": "user", "content": text}]) for title, text in PROMPTS.items()}
    say(f"loaded in {llm.timing.load_seconds:.1f} s; compiling ...")
    compiling = {name: warm_up(llm, prompts, params[name]) for name in params}
    say(f"compiled in {sum(compiling.values()):.1f} s; answering {len(prompts)} prompts, one at a time ...")
    runs: dict[str, list[Run]] = {name: [] for name in params}
    for title, prompt in prompts.items():
        for name in params:
            runs[name].append(answer(llm, prompt, params[name]))
        say(f"  {title}: " + ", ".join(f"{name} {taken[-1].seconds:.1f} s" for name, taken in runs.items()))
    return describe(llm, runs, compiling)


def warm_up(llm: LLM, prompts: dict[str, Any], params: SamplingParams) -> float:
    """Compiles what these prompts need, by one round of each; the seconds that compiling took."""
    before = llm.timing.compile_seconds
    for prompt in prompts.values():
        pieces = llm.stream(prompt, params)
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
    return llm.timing.compile_seconds - before


def answer(llm: LLM, prompt: Any, params: SamplingParams) -> Run:
    spent = lambda: llm.timing.prefill_seconds + llm.timing.decode_seconds
    before = spent()
    output = llm.generate([prompt], params, progress=False)[0]
    return Run(output, spent() - before)


def describe(llm: LLM, runs: dict[str, list[Run]], compiling: dict[str, float]) -> dict[str, Any]:
    """The JSON document."""
    from jaxspec.parallel.mesh import device_name

    methods: dict[str, Any] = {}
    for name, taken in runs.items():
        tokens, seconds = sum(len(run.token_ids) for run in taken), sum(run.seconds for run in taken)
        methods[name] = {
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "compile_seconds": compiling[name],
            "tokens_per_second_per_prompt": [len(run.token_ids) / run.seconds for run in taken],
        }
        if METHODS[name]:
            methods[name] |= speculation(taken, runs["plain"])
    return {
        "model": MODEL,
        "draft": None,
        "device": device_name(),
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
        "load_seconds": llm.timing.load_seconds,
        "prompts": list(PROMPTS.values()),
        "titles": list(PROMPTS),
        "answers": [run.output.outputs[0].text for run in runs["plain"]],
        "methods": methods,
    }


def speculation(taken: list[Run], plain: list[Run]) -> dict[str, Any]:
    """What a speculative method adds: its counters, and whether its answers are the plain ones."""
    total = SpecDecodeMetrics()
    for run in taken:
        total += run.output.metrics
    differences = list(first_differences(taken, plain))
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "num_drafts": total.num_drafts,
        "num_accepted_tokens_per_pos": total.num_accepted_tokens_per_pos,
        "mean_acceptance_length_per_prompt": [run.output.metrics.mean_acceptance_length for run in taken],
        "identical_to_plain": not differences,
        "differences": differences,
    }


def first_differences(taken: list[Run], plain: list[Run]) -> Iterator[dict[str, int]]:
    """Where each answer leaves the plain one: which prompt, and the first output position that differs."""
    for prompt, (mine, other) in enumerate(zip(taken, plain, strict=True)):
        a, b = mine.token_ids, other.token_ids
        if a != b:
            agree = [x == y for x, y in zip(a, b, strict=False)]
            yield {"prompt": prompt, "position": agree.index(False) if False in agree else len(agree)}


def show(document: dict[str, Any]) -> None:
    """Answers and tables on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for title, text in zip(document["titles"], document["answers"], strict=True):
        console.print(Text(f"\n{title}", style="bold"))
        console.print(Text(text.strip()))
    methods = document["methods"]

    console.print(f"\n{document['model']} on {document['device']}, greedy, one prompt at a time", highlight=False)
    table = Table()
    table.add_column("method")
    for column in ("tokens/s", "speed-up", "accept. length", "accepted at 1 2 3 4", "same"):
        table.add_column(column, justify="right")
    for name, m in methods.items():
        spoken = ["1.00x", "", "", ""]
        if "num_drafts" in m:
            ratio = m["tokens_per_second"] / methods["plain"]["tokens_per_second"]
            rates = " ".join(f"{rate:.0%}" for rate in acceptance_rates(m))
            same = "yes" if m["identical_to_plain"] else "NO"
            spoken = [f"{ratio:.2f}x", f"{m['mean_acceptance_length']:.2f}", rates, same]
        table.add_row(name, f"{m['tokens_per_second']:.1f}", *spoken)
    console.print(table)

    each = Table()
    each.add_column("prompt")
    for column in (*(f"{name}, tokens/s" for name in methods), "accept. length"):
        each.add_column(column, justify="right")
    speeds = zip(*(m["tokens_per_second_per_prompt"] for m in methods.values()), strict=True)
    lengths = methods["ngram"]["mean_acceptance_length_per_prompt"]
    for title, row, length in zip(document["titles"], speeds, lengths, strict=True):
        each.add_row(title, *(f"{speed:.1f}" for speed in row), f"{length:.2f}")
    console.print(each)
    compiled = ", ".join(f"{m['compile_seconds']:.1f} s ({name})" for name, m in methods.items())
    loaded = f"loading {document['load_seconds']:.1f} s"
    console.print(f"Not counted above: {loaded}, compiling {compiled}.", highlight=False)
    for d in methods["ngram"]["differences"]:
        where = f"{document['titles'][d['prompt']]!r}, output token {d['position']}"
        console.print(Text(f"ngram differs from plain: {where} (a tie that rounding decides differently, or a bug)"))


def acceptance_rates(method: dict[str, Any]) -> list[float]:
    """Of the rounds that drafted, the share that accepted the first, second, ... draft."""
    return [n / max(method["num_drafts"], 1) for n in method["num_accepted_tokens_per_pos"]]


def draw(document: dict[str, Any], path: Path) -> None:
    """Acceptance by position, and tokens per second by prompt, as a picture (format by the file's ending)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    methods, titles = document["methods"], document["titles"]
    colours = dict(zip(methods, ("#9aa5b1", "#2a7de1"), strict=True))
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the user's backend
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.9))

    ngram = methods["ngram"]
    rates = acceptance_rates(ngram)
    bars = left.bar(range(1, len(rates) + 1), rates, width=0.65, color=colours["ngram"])
    left.bar_label(bars, [f"{rate:.0%}" for rate in rates], padding=3, color="#333333")
    left.set(title="Drafts accepted, by position", xlabel="position in the round", ylabel="share of drafting rounds")
    left.set(xticks=range(1, len(rates) + 1), ylim=(0, 1.09))
    left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    groups = ["all prompts", *titles]
    width = 0.8 / len(methods)
    for i, (name, m) in enumerate(methods.items()):
        speeds = [m["tokens_per_second"], *m["tokens_per_second_per_prompt"]]
        at = [group + (i - (len(methods) - 1) / 2) * width for group in range(len(groups))]
        label = name if name == "plain" else f"{name}, acceptance length {m['mean_acceptance_length']:.2f}"
        bars = right.bar(at, speeds, width=width * 0.94, color=colours[name], label=label)
        right.bar_label(bars, [f"{speed:.0f}" for speed in speeds], padding=3, color="#333333")
    right.axvline(0.5, color="#cccccc", linewidth=1)
    right.set(title="Tokens per second", xticks=range(len(groups)), xticklabels=groups)
    right.set_ylim(top=right.get_ylim()[1] * 1.16)  # room for the legend
    right.legend(loc="upper right", frameon=False, ncols=len(methods))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
    k = document["num_speculative_tokens"]
    figure.suptitle(f"{document['model']} on {document['device']}: n-gram speculation, K = {k}, greedy", weight="bold")
    figure.savefig(path, dpi=150)
