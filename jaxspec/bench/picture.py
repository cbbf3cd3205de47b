"""Picture of the bench's results, with a panel for each kind of quantity that was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxspec.common.plots import new_figure
from jaxspec.common.writing import whole

Row = dict[str, Any]
ACCEPTANCE = "synthetic_acceptance_length"
PARTS = ("propose", "score", "verify")  # stages of a round, each measured by itself
BLUE, GREY, YELLOW, GREEN, RED = "#2a7de1", "#9aa5b1", "#e1a02a", "#3a9a5b", "#c0504d"
COLOURS = {"plain": GREY, "target": GREY, "draft": GREEN, "round": BLUE, "always K": GREY, "adaptive": BLUE}
COLOURS |= dict(zip(PARTS, (BLUE, GREY, YELLOW), strict=True))
WIDEST = 14.0  # largest width of a line of panels, in inches
OTHER_COLOURS = (BLUE, YELLOW, GREEN, RED, "#7a5fb5", "#4db6ac")
# Field of a result row -> text that shows its value under a bar.
SETTINGS = {
    "batch_size": "batch {}",
    "context": "context {}",
    "k": "K {}",
    ACCEPTANCE: "acceptance {:g}",
    "run": "run {}",
}


@dataclasses.dataclass
class Bar:
    """One bar, or one group of bars, of a panel.

    row: the result row whose settings (batch size, context, K, ...) are written under the bar.
    values: height of each bar, by the name of its series in the legend. Several bars are drawn side by side, or
      stacked in a stacked panel.
    name: text under the bar, before the settings.
    marks: height of each line across the bar, by the line's name in the legend.
    """

    row: Row
    values: dict[str, float]
    name: str = ""
    marks: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Panel:
    """One panel of the picture.

    stacked: whether the bars of a group are drawn on top of each other.
    level: name in the legend of the line drawn at height 1, empty for no line.
    """

    title: str
    bars: list[Bar]
    stacked: bool = False
    level: str = ""

    @property
    def width(self) -> float:
        """Width of the panel in inches."""
        columns = sum(1 if self.stacked else len(bar.values) for bar in self.bars)
        return max(3.6, 1.0 + 0.45 * columns, 1.0 + 0.8 * len(self.bars))


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the picture of a bench's JSON document to a file. The file's suffix decides the format."""
    with whole(path) as partial:
        figure(document).savefig(partial, dpi=150)


def figure(document: dict[str, Any]) -> Any:
    """Return the picture of a bench's JSON document as a matplotlib figure."""
    lines = wrapped([panel for panel in (make(document["rows"]) for make in PANELS) if panel.bars])
    width = max(sum(panel.width for panel in line) for line in lines)
    made = new_figure(max(width, 6.4), 4.6 * len(lines))
    for part, line in zip(made.subfigures(len(lines), 1, squeeze=False)[:, 0], lines, strict=True):
        sheets = part.subplots(1, len(line), squeeze=False, width_ratios=[panel.width for panel in line])[0]
        for axes, panel in zip(sheets, line, strict=True):
            show(axes, panel)
    made.suptitle(f"{document['preset']} ({document['dtype']}) on {document['device']}", weight="bold")
    return made


def wrapped(panels: list[Panel]) -> list[list[Panel]]:
    """Arrange the panels in lines of at most WIDEST inches. A wider panel gets a line of its own."""
    lines: list[list[Panel]] = []
    for panel in panels:
        if lines and sum(other.width for other in lines[-1]) + panel.width <= WIDEST:
            lines[-1].append(panel)
        else:
            lines.append([panel])
    return lines


def show(axes: Any, panel: Panel) -> None:
    """Draw a panel's bars, marks and legend on the matplotlib axes."""
    series = list(dict.fromkeys(name for bar in panel.bars for name in bar.values))
    free = iter(OTHER_COLOURS * len(series))
    colours = {name: COLOURS.get(name) or next(free) for name in series}
    seen: set[str] = set()

    def new(name: str) -> str | None:
        """Return the name of a series for the legend the first time that it is drawn, then None."""
        if name in seen:
            return None
        seen.add(name)
        return name

    for at, bar in enumerate(panel.bars):
        width = 0.6 if panel.stacked else min(0.8 / len(bar.values), 0.4)
        bottom = 0.0
        for i, (name, value) in enumerate(bar.values.items()):
            left = at if panel.stacked else at + width * (i - (len(bar.values) - 1) / 2)
            drawn = axes.bar(left, value, width * 0.94, bottom=bottom, color=colours[name], label=new(name))
            if panel.stacked:
                bottom += value
            else:
                axes.bar_label(drawn, [digits(value)], fontsize="x-small", padding=2)
        if panel.stacked:
            top = max([bottom, *bar.marks.values()])
            text = digits(bar.marks.get("round", bottom))
            axes.annotate(text, (at, top), (0, 2), textcoords="offset points", ha="center", fontsize="x-small")
        for name, value in bar.marks.items():
            style = {"color": "black", "linestyle": ":" if name == "floor" else "-", "linewidth": 1.6}
            axes.plot([at - 0.4, at + 0.4], [value, value], label=new(name), **style)
    if panel.level:
        axes.axhline(1.0, color="black", linewidth=1, label=new(panel.level))
    ticks, common = labels(panel.bars)
    axes.set(title=panel.title, xlabel=common, xticks=range(len(panel.bars)), xticklabels=ticks)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.set_xlim(-0.6, len(panel.bars) - 0.4)
    axes.yaxis.set_major_formatter("{x:,g}")
    titles = " ".join([panel.title.lower(), *(bar.name for bar in panel.bars)])
    if len(seen) > 1 or not all(name in titles for name in seen):
        axes.set_ylim(top=axes.get_ylim()[1] * (1.1 + 0.04 * len(seen)))  # room for the legend above the bars
        axes.legend(frameon=False, fontsize="small", loc="upper right", ncols=2)


def labels(bars: list[Bar]) -> tuple[list[str], str]:
    """Return the text under each bar, with the settings that differ, and one text with the settings that all share."""
    texts = [{name: text.format(bar.row[name]) for name, text in SETTINGS.items() if bar.row.get(name)} for bar in bars]
    common: dict[str, str] = {}
    for name in SETTINGS:
        values = {settings[name] for settings in texts if name in settings}
        if len(values) == 1:
            common[name] = values.pop()
    under = []
    for bar, settings in zip(bars, texts, strict=True):
        own = [text for name, text in settings.items() if name not in common]
        under.append("\n".join(filter(None, [bar.name, *own])))
    return under, ", ".join(common.values())


def digits(value: float) -> str:
    """Return the value as text with about three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# One function for each panel. Each takes all result rows of a document.


def speeds(rows: list[Row]) -> Panel:
    """Return the panel of tokens per second: plain decoding beside speculative decoding with every K."""
    plain = {place(r): r["tokens_per_second"] for r in rows if r["stage"] == "plain"}
    bars: dict[tuple[Any, ...], Bar] = {}
    for r in rows:
        if r["stage"] == "speculative":
            first = {"plain": plain[place(r)]} if place(r) in plain else {}
            bar = bars.setdefault((*place(r), r[ACCEPTANCE]), Bar({**r, "k": None}, first))
            bar.values[f"K {r['k']}"] = r["tokens_per_second"]
    return Panel("Tokens per second", list(bars.values()) or each(rows, "plain", "tokens_per_second"))


def times(rows: list[Row]) -> Panel:
    """Return the panel of the milliseconds of passes and rounds.

    A round's bar is made of those of its stages (propose, score, verify) that were measured. The stages are timed
    separately and need not add up to the time of the round.
    """
    bars = [
        Bar(r, {r["stage"]: r["ms"]}, name=r["stage"], marks={"floor": r["floor_ms"]})
        for r in rows
        if r["stage"] in ("target", "draft")
    ]
    parts: dict[tuple[Any, ...], Bar] = {}
    for r in rows:
        if r["stage"] in PARTS:
            bar = parts.setdefault((*place(r), r["k"]), Bar(r, {}))
            bar.values[r["stage"]] = r["ms"]
            bar.name = "round" if len(bar.values) > 1 else r["stage"]
    rounds = []
    for r in rows:
        if r["stage"] == "round":
            took = {"round": r["ms"]}
            floor = {"floor": r["floor_ms"]}
            stages = parts.get((*place(r), r["k"]))
            if stages:
                rounds.append(Bar(r, stages.values, "round", took | floor))
            else:
                rounds.append(Bar(r, took, "round", floor))
    drawn = {(*place(bar.row), bar.row["k"]) for bar in rounds}
    alone = [bar for at, bar in parts.items() if at not in drawn]
    return Panel("Milliseconds", bars + rounds + alone, stacked=True)


def attention(rows: list[Row]) -> Panel:
    """Return the panel of the attention's time in milliseconds, for one query per row and for K + 1 queries."""
    bars: dict[tuple[Any, ...], Bar] = {}
    for r in rows:
        if r["stage"] == "attention":
            bar = bars.setdefault(place(r), Bar({**r, "k": None}, {}))
            bar.values[f"{r['k'] + 1} queries" if r["k"] else "1 query"] = r["ms"]
    return Panel("Attention: milliseconds", list(bars.values()))


def prefill(rows: list[Row]) -> Panel:
    """Return the panel of the prefill's speed, in prompt tokens per second."""
    return Panel("Prefill: tokens per second", each(rows, "prefill", "tokens_per_second"))


def ways(rows: list[Row]) -> Panel:
    """Return the panel of the speed-ups over plain decoding, with always K draft tokens and with adaptive K."""
    bars: dict[tuple[Any, ...], Bar] = {}
    for r in rows:
        if r["stage"] == "adaptive" and r["way"] != "off":
            bar = bars.setdefault((*place(r), r["k"], r[ACCEPTANCE]), Bar(r, {}))
            bar.values["always K" if r["way"] == "always" else r["way"]] = r["speedup"]
    return Panel("Speed beside off", list(bars.values()), level="off")


def load(rows: list[Row]) -> Panel:
    """Return the panel of tokens per second under load."""
    return Panel("Load: tokens per second", each(rows, "load", "tokens_per_second"))


def first_token(rows: list[Row]) -> Panel:
    """Return the panel of the time to the first token, in milliseconds."""
    return Panel("Load: ms to the first token", waits(rows, "time_to_first_token_ms"))


def next_token(rows: list[Row]) -> Panel:
    """Return the panel of the time to each further token, in milliseconds."""
    return Panel("Load: ms to each further token", waits(rows, "time_per_output_token_ms"))


PANELS = (speeds, times, attention, prefill, ways, load, first_token, next_token)


def waits(rows: list[Row], figure: str) -> list[Bar]:
    """Return bars of the median and the 99th percentile of a latency, for each result row of `load` that has it.

    figure: name of the field that holds the latency.
    """
    loads = [r for r in rows if r["stage"] == "load" and r[figure]["p50"] is not None]
    return [Bar(r, {name: r[figure][name] for name in ("p50", "p99")}) for r in loads]


def each(rows: list[Row], stage: str, figure: str) -> list[Bar]:
    """Return a bar for each result row of a stage. figure: name of the field with the bar's height."""
    return [Bar(r, {stage: r[figure]}) for r in rows if r["stage"] == stage]


def place(row: Row) -> tuple[int, int]:
    """Return the batch size and the context length of a result row."""
    return row["batch_size"], row["context"]
