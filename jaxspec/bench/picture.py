"""The document as a picture: a panel for each kind of figure that the run measured, and nothing for the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxspec.common.writing import whole

Row = dict[str, Any]
ACCEPTANCE = "synthetic_acceptance_length"
PARTS = ("propose", "score", "verify")  # of a round
BLUE, GREY, YELLOW, GREEN, RED = "#2a7de1", "#9aa5b1", "#e1a02a", "#3a9a5b", "#c0504d"
COLOURS = {"plain": GREY, "target": GREY, "draft": GREEN, "round": BLUE, "always K": GREY, "adaptive": BLUE}
COLOURS |= dict(zip(PARTS, (BLUE, GREY, YELLOW), strict=True))
WIDEST = 14.0  # inches of a line of panels
OTHERS = (BLUE, YELLOW, GREEN, RED, "#7a5fb5", "#4db6ac")
SETTINGS = {
    "batch_size": "batch {}",
    "context": "context {}",
    "k": "K {}",
    ACCEPTANCE: "acceptance {:g}",
    "run": "run {}",
}


@dataclasses.dataclass
class Bar:
    """One place of a panel.

    row: it tells the settings under the bar; name: what else stands there.
    values: series -> height, side by side, or on top of each other.
    marks: series -> height of a line across the bar.
    """

    row: Row
    values: dict[str, float]
    name: str = ""
    marks: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Panel:
    title: str
    bars: list[Bar]
    stacked: bool = False
    level: str = ""  # what the line at 1 means

    @property
    def width(self) -> float:
        """Inches."""
        columns = sum(1 if self.stacked else len(bar.values) for bar in self.bars)
        return max(3.6, 1.0 + 0.45 * columns, 1.0 + 0.8 * len(self.bars))


def draw(document: dict[str, Any], path: Path) -> None:
    with whole(path) as partial:
        figure(document).savefig(partial, dpi=150)


def figure(document: dict[str, Any]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = wrapped([panel for panel in (make(document["rows"]) for make in PANELS) if panel.bars])
    width = max(sum(panel.width for panel in line) for line in lines)
    made = Figure(figsize=(max(width, 6.4), 4.6 * len(lines)), layout="constrained")
    FigureCanvasAgg(made)  # no window, whatever the user's backend
    for part, line in zip(made.subfigures(len(lines), 1, squeeze=False)[:, 0], lines, strict=True):
        sheets = part.subplots(1, len(line), squeeze=False, width_ratios=[panel.width for panel in line])[0]
        for axes, panel in zip(sheets, line, strict=True):
            show(axes, panel)
    made.suptitle(f"{document['preset']} ({document['dtype']}) on {document['device']}", weight="bold")
    return made


def wrapped(panels: list[Panel]) -> list[list[Panel]]:
    """The panels in lines of WIDEST inches, or of one panel that is wider."""
    lines: list[list[Panel]] = []
    for panel in panels:
        if lines and sum(other.width for other in lines[-1]) + panel.width <= WIDEST:
            lines[-1].append(panel)
        else:
            lines.append([panel])
    return lines


def show(axes: Any, panel: Panel) -> None:
    series = list(dict.fromkeys(name for bar in panel.bars for name in bar.values))
    free = iter(OTHERS * len(series))
    colours = {name: COLOURS.get(name) or next(free) for name in series}
    seen: set[str] = set()
    new = lambda name: name if name not in seen and not seen.add(name) else None  # type: ignore[func-returns-value]
    for at, bar in enumerate(panel.bars):
        width, bottom = (0.6 if panel.stacked else min(0.8 / len(bar.values), 0.4)), 0.0
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
    told = " ".join([panel.title.lower(), *(bar.name for bar in panel.bars)])
    if len(seen) > 1 or not all(name in told for name in seen):
        axes.set_ylim(top=axes.get_ylim()[1] * (1.1 + 0.04 * len(seen)))  # room for the legend
        axes.legend(frameon=False, fontsize="small", loc="upper right", ncols=2)


def labels(bars: list[Bar]) -> tuple[list[str], str]:
    """What stands under each bar, and under all of them: the settings that differ, and those that do not."""
    told = [{name: text.format(bar.row[name]) for name, text in SETTINGS.items() if bar.row.get(name)} for bar in bars]
    common = {name for name in SETTINGS if len({one[name] for one in told if name in one}) == 1}
    own = [[bar.name, *(one[name] for name in one if name not in common)] for bar, one in zip(bars, told, strict=True)]
    shared = ", ".join(next(one[name] for one in told if name in one) for name in SETTINGS if name in common)
    return ["\n".join(filter(None, texts)) for texts in own], shared


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# The panels: the rows of a document -> what is drawn of them.


def speeds(rows: list[Row]) -> Panel:
    """Plain decoding beside every K."""
    plain = {place(r): r["tokens_per_second"] for r in rows if r["stage"] == "plain"}
    bars: dict[tuple, Bar] = {}
    for r in rows:
        if r["stage"] == "speculative":
            first = {"plain": plain[place(r)]} if place(r) in plain else {}
            bar = bars.setdefault((*place(r), r[ACCEPTANCE]), Bar({**r, "k": None}, first))
            bar.values[f"K {r['k']}"] = r["tokens_per_second"]
    return Panel("Tokens per second", list(bars.values()) or each(rows, "plain", "tokens_per_second"))


def times(rows: list[Row]) -> Panel:
    """Passes, and rounds: their stages on top of each other, which are timed apart and need not add up to the whole."""
    bars = [
        Bar(r, {r["stage"]: r["ms"]}, name=r["stage"], marks={"floor": r["floor_ms"]})
        for r in rows
        if r["stage"] in ("target", "draft")
    ]
    parts: dict[tuple, Bar] = {}
    for r in rows:
        if r["stage"] in PARTS:
            bar = parts.setdefault((*place(r), r["k"]), Bar(r, {}))
            bar.values[r["stage"]] = r["ms"]
            bar.name = "round" if len(bar.values) > 1 else r["stage"]
    rounds = []
    for r in rows:
        if r["stage"] == "round":
            took, floor = {"round": r["ms"]}, {"floor": r["floor_ms"]}
            of = parts.get((*place(r), r["k"]))
            rounds.append(Bar(r, of.values, "round", took | floor) if of else Bar(r, took, "round", floor))
    drawn = {(*place(bar.row), bar.row["k"]) for bar in rounds}
    alone = [bar for at, bar in parts.items() if at not in drawn]
    return Panel("Milliseconds", bars + rounds + alone, stacked=True)


def attention(rows: list[Row]) -> Panel:
    bars: dict[tuple, Bar] = {}
    for r in rows:
        if r["stage"] == "attention":
            bar = bars.setdefault(place(r), Bar({**r, "k": None}, {}))
            bar.values[f"{r['k'] + 1} queries" if r["k"] else "1 query"] = r["ms"]
    return Panel("Attention: milliseconds", list(bars.values()))


def prefill(rows: list[Row]) -> Panel:
    return Panel("Prefill: tokens per second", each(rows, "prefill", "tokens_per_second"))


def ways(rows: list[Row]) -> Panel:
    """Always K and adaptive K beside plain decoding."""
    bars: dict[tuple, Bar] = {}
    for r in rows:
        if r["stage"] == "adaptive" and r["way"] != "off":
            bar = bars.setdefault((*place(r), r["k"], r[ACCEPTANCE]), Bar(r, {}))
            bar.values["always K" if r["way"] == "always" else r["way"]] = r["speedup"]
    return Panel("Speed beside off", list(bars.values()), level="off")


def load(rows: list[Row]) -> Panel:
    return Panel("Load: tokens per second", each(rows, "load", "tokens_per_second"))


def first_token(rows: list[Row]) -> Panel:
    return Panel("Load: ms to the first token", waits(rows, "time_to_first_token_ms"))


def next_token(rows: list[Row]) -> Panel:
    return Panel("Load: ms to each further token", waits(rows, "time_per_output_token_ms"))


PANELS = (speeds, times, attention, prefill, ways, load, first_token, next_token)


def waits(rows: list[Row], figure: str) -> list[Bar]:
    """Those of each run, where there are any."""
    loads = [r for r in rows if r["stage"] == "load" and r[figure]["p50"] is not None]
    return [Bar(r, {name: r[figure][name] for name in ("p50", "p99")}) for r in loads]


def each(rows: list[Row], stage: str, figure: str) -> list[Bar]:
    """A bar for each row of a stage."""
    return [Bar(r, {stage: r[figure]}) for r in rows if r["stage"] == stage]


def place(row: Row) -> tuple[int, int]:
    return row["batch_size"], row["context"]
