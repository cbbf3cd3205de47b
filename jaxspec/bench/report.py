"""Tables of the bench's results on standard output."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
Setting = tuple[int, int, int | None, float | None]  # batch size, context, K, synthetic acceptance length


def show(document: dict[str, Any]) -> None:
    """Print the tables of a bench's JSON document."""
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
    """Return a table without rows, formatted to fit into 80 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title, title_justify="left")
    made.add_column(first, no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right")
    return made


def stage_table(rows: list[Row]) -> Any:
    """Return a table with a line for each result row of a stage.

    ms is the time of a pass or a round; for `prefill` of all prompts; for `plain` and `speculative` of one token of a
    row. The column after ms is half the distance between the quartiles, relative to ms.
    """
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
    """Return a table with a line for each run of the stage `load`. ratio: the run's time over the least possible."""
    made = table("run", "requests", "rows", "K", "tokens", "tokens/s", "ratio", "accept.")
    for r in rows:
        k = "" if r["k"] is None else str(r["k"])
        counts = (r["run"], r["requests"], r["batch_size"])
        figures = (f"{r['tokens_per_second']:,.0f}", f"{r['ratio']:.2f}", f"{r['acceptance_length']:.2f}")
        made.add_row(*map(str, counts), k, f"{r['tokens']:,}", *figures)
    return made


def wait_table(rows: list[Row]) -> Any:
    """Return a table of the latencies under load: mean, median and 99th percentile."""
    made = table("run", "first", "p50", "p99", "next", "p50", "p99", title="ms to the first token, and to each further")
    for r in rows:
        names = ("time_to_first_token_ms", "time_per_output_token_ms")
        made.add_row(str(r["run"]), *(digits(ms) for name in names for ms in r[name].values()))
    return made


def time_table(rows: list[Row]) -> Any:
    """Return a table of the seconds that each part of the work took in a run of the stage `load`."""
    names = list(rows[0]["seconds"])
    made = table("run", *names, title="Seconds")
    for r in rows:
        made.add_row(str(r["run"]), *(f"{r['seconds'][name]:.2f}" for name in names))
    return made


def digits(ms: float | None) -> str:
    """Format milliseconds with about three significant digits, None as an empty string."""
    if ms is None:
        return ""
    if ms < 1:
        return f"{ms:.3f}"
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


def way_table(rows: list[Row]) -> Any:
    """Return a table of the stage `adaptive`, with a line for each setting (batch size, context, K, acceptance).

    Its columns are tokens per second without drafts, with K draft tokens always and with adaptive K, and the speed-ups
    over decoding without drafts.
    """
    columns = ("batch", "context", "K", "off", "always K", "", "adaptive", "")
    made = table("acceptance", *columns, title="Never slower than off: tokens per second")
    for setting, ways in settings(rows).items():
        batch_size, context, k, length = setting
        speeds = [f"{ways['off']['tokens_per_second']:.1f}"]
        for way in ("always", "adaptive"):
            speeds += [f"{ways[way]['tokens_per_second']:.1f}", f"{ways[way]['speedup']:.2f}x"]
        made.add_row(f"{length:g}", str(batch_size), str(context), str(k), *speeds)
    return made


def settings(rows: list[Row]) -> dict[Setting, dict[str, Row]]:
    """Group result rows by setting (batch size, context, K, synthetic acceptance length), then by way of decoding."""
    found: dict[Setting, dict[str, Row]] = {}
    for r in rows:
        setting = (r["batch_size"], r["context"], r["k"], r["synthetic_acceptance_length"])
        found.setdefault(setting, {})[r["way"]] = r
    return found
