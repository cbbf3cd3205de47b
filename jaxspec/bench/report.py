"""The document as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxspec.writing import whole

Row = dict[str, Any]
PARTS = {"propose": "#2a7de1", "score": "#9aa5b1", "verify": "#e1a02a"}  # stages of a round -> colour
WAY_COLOURS = {"always": "#9aa5b1", "adaptive": "#2a7de1"}


def show(document: dict[str, Any]) -> None:
    """Tables on standard output."""
    from rich.console import Console

    console = Console()
    console.print(f"{document['preset']} ({document['dtype']}) on {document['device']}", highlight=False)
    if stages := [r for r in document["rows"] if r["stage"] not in ("adaptive", "load")]:
        console.print(stage_table(stages))
    if loads := [r for r in document["rows"] if r["stage"] == "load"]:
        for table_of in (load_table, wait_table, time_table):
            console.print(table_of(loads))
    if ways := [r for r in document["rows"] if r["stage"] == "adaptive"]:
        console.print(way_table(ways))
    reading = f", read {document['read_bandwidth_gb_s']:.1f} GB/s" if document["read_bandwidth_gb_s"] else ""
    console.print(
        f"Floors from: copy {document['copy_bandwidth_gb_s']:.1f} GB/s{reading}, matrix product "
        f"{document['matrix_peak_tflops']:.2f} TFLOP/s. Not counted: loading {document['load_seconds']:.1f} s, "
        f"compiling {document['compile_seconds']:.1f} s.",
        highlight=False,
    )


def table(first: str, *columns: str, title: str | None = None) -> Any:
    """Narrow enough for a terminal of 80 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title, title_justify="left")
    made.add_column(first, no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right")
    return made


def stage_table(rows: list[Row]) -> Any:
    """ms: of a pass or a round; of `prefill` of the whole prompts; of `plain` and `speculative` of a token of a row.
    The figure behind it is half the distance of the quartiles."""
    made = table("stage", "batch", "context", "K", "ms", "", "floor", "ratio", "tokens/s", "accept.")
    for r in rows:
        k = "" if r["k"] is None else str(r["k"])
        speed = "" if r["tokens_per_second"] is None else f"{r['tokens_per_second']:,.1f}"
        length = "" if r["acceptance_length"] is None else f"{r['acceptance_length']:.2f}"
        spread = f"±{(r['spread'][1] - r['spread'][0]) / 2 / r['ms']:.0%}"
        figures = (digits(r["ms"]), spread, digits(r["floor_ms"]), f"{r['ratio']:.2f}", speed, length)
        made.add_row(r["stage"], str(r["batch_size"]), str(r["context"]), k, *figures)
    return made


def load_table(rows: list[Row]) -> Any:
    """The ratio: how often the time that plain decoding and its prefill would take at best."""
    made = table("run", "requests", "rows", "K", "tokens", "tokens/s", "ratio", "accept.")
    for r in rows:
        k, counts = "" if r["k"] is None else str(r["k"]), (r["run"], r["requests"], r["batch_size"])
        figures = (f"{r['tokens_per_second']:,.0f}", f"{r['ratio']:.2f}", f"{r['acceptance_length']:.2f}")
        made.add_row(*map(str, counts), k, f"{r['tokens']:,}", *figures)
    return made


def wait_table(rows: list[Row]) -> Any:
    """Mean, median, 99th percentile."""
    made = table("run", "first", "p50", "p99", "next", "p50", "p99", title="ms to the first token, and to each further")
    for r in rows:
        names = ("time_to_first_token_ms", "time_per_output_token_ms")
        made.add_row(str(r["run"]), *(digits(ms) for name in names for ms in r[name].values()))
    return made


def time_table(rows: list[Row]) -> Any:
    """Where the seconds of a run went."""
    names = list(rows[0]["seconds"])
    made = table("run", *names, title="Seconds")
    for r in rows:
        made.add_row(str(r["run"]), *(f"{r['seconds'][name]:.2f}" for name in names))
    return made


def digits(ms: float | None) -> str:
    """Three that mean something; nothing where there is nothing to tell."""
    if ms is None:
        return ""
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


def way_table(rows: list[Row]) -> Any:
    """One line a setting: tokens per second off, always K and adaptive, and what that is beside off."""
    columns = ("batch", "context", "K", "off", "always K", "", "adaptive", "")
    made = table("acceptance", *columns, title="Never slower than off: tokens per second")
    for setting, ways in settings(rows).items():
        batch_size, context, k, length = setting
        speeds = [f"{ways['off']['tokens_per_second']:.1f}"]
        for way in ("always", "adaptive"):
            speeds += [f"{ways[way]['tokens_per_second']:.1f}", f"{ways[way]['speedup']:.2f}x"]
        made.add_row(f"{length:g}", str(batch_size), str(context), str(k), *speeds)
    return made


def settings(rows: list[Row]) -> dict[tuple, dict[str, Row]]:
    """(batch size, context, K, asked acceptance length) -> way -> its row."""
    found: dict[tuple, dict[str, Row]] = {}
    for r in rows:
        setting = (r["batch_size"], r["context"], r["k"], r["synthetic_acceptance_length"])
        found.setdefault(setting, {})[r["way"]] = r
    return found


def draw(document: dict[str, Any], path: Path) -> None:
    """Speed against K, time per round by stage, and adaptive K beside off, as far as they were measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = document["rows"]
    panels = {
        draw_speed: [r for r in rows if r["stage"] in ("plain", "speculative")],
        draw_parts: [r for r in rows if r["stage"] in ("round", *PARTS)],
        draw_ways: [r for r in rows if r["stage"] == "adaptive"],
    }
    drawn = {panel: chosen for panel, chosen in panels.items() if chosen}
    widths = [max(5.2, 0.55 * len(settings(chosen))) for chosen in drawn.values()]
    figure = Figure(figsize=(1 + sum(widths), 4.6), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the user's backend
    sheets = figure.subplots(1, len(drawn), squeeze=False, width_ratios=widths)[0]
    for axes, (panel, chosen) in zip(sheets, drawn.items(), strict=True):
        panel(axes, chosen)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.3)  # room for the legend
        axes.legend(frameon=False, fontsize="small", loc="upper right", ncols=2)
    figure.suptitle(f"{document['preset']} on {document['device']}", weight="bold")
    with whole(path) as partial:
        figure.savefig(partial, dpi=150)


def draw_speed(axes: Any, rows: list[Row]) -> None:
    """A line for each batch size, context and acceptance length; K = 0 is plain decoding."""
    plain = {(r["batch_size"], r["context"]): r["tokens_per_second"] for r in rows if r["stage"] == "plain"}
    lines: dict[tuple, dict[int, float]] = {}
    for r in rows:
        if r["stage"] == "speculative":
            place = (r["batch_size"], r["context"])
            start = {0: plain[place]} if place in plain else {}
            line = lines.setdefault((*place, r["synthetic_acceptance_length"]), start)
            line[r["k"]] = r["tokens_per_second"]
    lines = lines or {(*place, None): {0: speed} for place, speed in plain.items()}
    for (batch_size, context, length), line in lines.items():
        accepted = f", acceptance {length:g}" if length else ""
        axes.plot(list(line), list(line.values()), marker="o", label=f"batch {batch_size}, context {context}{accepted}")
    axes.set(
        title="Tokens per second", xlabel="K (0: plain)", xticks=sorted({k for line in lines.values() for k in line})
    )


def draw_parts(axes: Any, rows: list[Row]) -> None:
    """Stages stacked, the whole round as a mark: timed apart, the stages need not add up to it."""
    times: dict[tuple, dict[str, float]] = {}
    for r in rows:
        times.setdefault((r["batch_size"], r["context"], r["k"]), {})[r["stage"]] = r["ms"]
    at = range(len(times))
    bottom = [0.0] * len(times)
    for part, colour in PARTS.items():
        heights = [stages.get(part, 0.0) for stages in times.values()]
        axes.bar(at, heights, width=0.6, bottom=bottom, color=colour, label=part)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    whole = [(i, stages["round"]) for i, stages in enumerate(times.values()) if "round" in stages]
    axes.plot([i for i, _ in whole], [ms for _, ms in whole], "_", color="black", markersize=30, label="round")
    names = [f"B {b}\n{c}\nK {k}" for b, c, k in times]
    axes.set(title="Time per round", ylabel="ms", xlabel="batch, context, K", xticks=at, xticklabels=names)


def draw_ways(axes: Any, rows: list[Row]) -> None:
    """Beside off, whose line is at 1."""
    found = settings(rows)
    for i, (way, colour) in enumerate(WAY_COLOURS.items()):
        at = [place + 0.4 * (i - 0.5) for place in range(len(found))]
        axes.bar(at, [ways[way]["speedup"] for ways in found.values()], width=0.38, color=colour, label=way)
    axes.axhline(1.0, color="black", linewidth=1, label="off")
    names = [f"{length:g}\nB {b}\nK {k}" for b, _, k, length in found]
    axes.set(
        title="Speed beside off, by acceptance length",
        xlabel="acceptance length, batch, K",
        xticks=range(len(found)),
        xticklabels=names,
    )
