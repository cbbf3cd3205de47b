"""Tables and a picture of the demo's measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxspec.common.plots import new_figure
from jaxspec.common.writing import whole
from jaxspec.drafters.methods import LOOKUP

Document = dict[str, Any]
PEERS = {"float32": "transformers f32", "bfloat16": "transformers bf16"}
COLOURS = {"plain": "#9aa5b1", "n-gram": "#2a7de1", "both": "#3a9a5b"}
DRAFT_COLOUR = "#e1812a"  # colour of the draft model or head


def named(method: str) -> str:
    """Return the name that a method has in the tables. The names of plain decoding and of a head stay as they are."""
    if method.startswith(LOOKUP):
        return "both"
    return {"ngram": "n-gram", "draft_model": "draft"}.get(method, method)


def show(document: Document) -> None:
    """Print the answers and the tables of the demo's JSON document."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for title, text in zip(document["titles"], document["answers"], strict=True):
        console.print(Text(f"\n{title}", style="bold"))
        console.print(Text(text.strip()))
    methods = document["methods"]
    form = f", weights in {document['quantization']}" if document.get("quantization") else ""
    where = f"{document['model']} on {document['device']}, {document['dtype']}{form}"
    console.print(f"\n{where}, greedy, one prompt at a time", highlight=False)
    console.print(method_table(document))
    console.print(prompt_table(document))
    compiled = ", ".join(f"{m['compile_seconds']:.1f} s ({named(name)})" for name, m in methods.items())
    loaded = f"loading {document['load_seconds']:.1f} s"
    console.print(f"Not counted above: {loaded}, compiling {compiled}.", highlight=False)
    for name, m in speculative(document).items():
        for d in m["differences"]:
            place = f"{document['titles'][d['prompt']]!r}, output token {d['position']}"
            why = "a tie that rounding decides differently, or a bug"
            console.print(Text(f"{named(name)} differs from plain: {place} ({why})"))


def speculative(document: Document) -> dict[str, Any]:
    """Return the document's entries of the speculative methods, by name."""
    return {name: m for name, m in document["methods"].items() if "num_drafts" in m}


def empty_table(first: str, *columns: str) -> Any:
    """Return a table without rows, formatted to fit into 80 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def method_table(document: Document) -> Any:
    """Return a table with a line for each method, and one for each dtype in which transformers was compared."""
    table = empty_table("method", "K", "tokens/s", "speed-up", "accept.", "% at 1 2 3 4", "same")
    plain = document["methods"]["plain"]["tokens_per_second"]
    for name, m in document["methods"].items():
        drafting = ["", "", ""]
        if "num_drafts" in m:
            rates = " ".join(f"{100 * rate:.0f}" for rate in acceptance_rates(m))
            drafting = [f"{m['mean_acceptance_length']:.2f}", rates, "yes" if m["identical_to_plain"] else "NO"]
        speed = m["tokens_per_second"]
        k = str(m.get("num_speculative_tokens", ""))
        table.add_row(named(name), k, f"{speed:.1f}", f"{speed / plain:.2f}x", *drafting)
    for dtype, m in (document["transformers"] or {}).items():
        same = f"{m['same_answers']}/{len(document['prompts'])}"
        speed = m["tokens_per_second"]
        table.add_row(PEERS[dtype], "", f"{speed:.1f}", f"{speed / plain:.2f}x", "", "", same)
    return table


def prompt_table(document: Document) -> Any:
    """Return a table of tokens per second by prompt and method, with the acceptance length of speculative methods."""
    methods = document["methods"]
    drafting = speculative(document)
    table = empty_table("tokens/s (accept.)", *map(named, methods))
    for i, title in enumerate(document["titles"]):
        cells = []
        for name, m in methods.items():
            length = f" ({m['mean_acceptance_length_per_prompt'][i]:.2f})" if name in drafting else ""
            cells.append(f"{m['tokens_per_second_per_prompt'][i]:.1f}{length}")
        table.add_row(title, *cells)
    return table


def acceptance_rates(method: Document) -> list[float]:
    """Return the shares of a method's drafting rounds that accepted the first, second, ... draft token."""
    return [n / max(method["num_drafts"], 1) for n in method["num_accepted_tokens_per_pos"]]


def draw(document: Document, path: Path) -> None:
    """Draw the acceptance by position and the tokens per second by prompt, as the file `path`."""
    methods = document["methods"]
    titles = document["titles"]
    drafting = speculative(document)
    figure = new_figure(12, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.9))

    positions = range(1, 1 + max(len(m["num_accepted_tokens_per_pos"]) for m in drafting.values()))
    for i, (name, m) in enumerate(drafting.items()):
        bars(left, i, len(drafting), acceptance_rates(m), name, "{:.0%}")
    left.set(title="Drafts accepted, by position", xlabel="position in the round", ylabel="share of drafting rounds")
    left.set(xticks=range(len(positions)), xticklabels=positions, ylim=(0, 1.09))
    left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    for i, (name, m) in enumerate(methods.items()):
        label = named(name)
        if name in drafting:
            label += f", K = {m['num_speculative_tokens']}, acceptance length {m['mean_acceptance_length']:.2f}"
        speeds = [m["tokens_per_second"], *m["tokens_per_second_per_prompt"]]
        bars(right, i, len(methods), speeds, name, "{:.0f}", label)
    right.axvline(0.5, color="#cccccc", linewidth=1)
    right.set(title="Tokens per second", xticks=range(1 + len(titles)), xticklabels=["all prompts", *titles])
    right.set_ylim(top=right.get_ylim()[1] * 1.45)  # room for the legend above the bars
    right.legend(loc="upper right", frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
    figure.suptitle(f"{document['model']} on {document['device']}, greedy", weight="bold")
    with whole(path) as partial:
        figure.savefig(partial, dpi=150)


def bars(axes: Any, i: int, count: int, values: list[float], name: str, form: str, label: str | None = None) -> None:
    """Draw the i-th of `count` bars in every group of bars.

    values: heights, one for each group. name: method of the bars, which decides their colour. form: format of the
    number above each bar. label: text in the legend.
    """
    width = 0.8 / count
    at = [group + (i - (count - 1) / 2) * width for group in range(len(values))]
    drawn = axes.bar(at, values, width=width * 0.94, color=COLOURS.get(named(name), DRAFT_COLOUR), label=label)
    size = 10 if count < 3 else 8
    axes.bar_label(drawn, [form.format(value) for value in values], padding=3, color="#333333", fontsize=size)
