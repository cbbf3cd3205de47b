"""Plotting the loss and the acceptance length of a training run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxspec.common.plots import new_figure
from jaxspec.common.writing import whole


def draw(rows: Sequence[dict[str, Any]], path: Path, *, num_speculative_tokens: int) -> None:
    """Write a picture of loss and acceptance length over the steps. rows: the lines of the run's metrics.jsonl."""

    def column(name: str) -> Iterator[tuple[Any, ...]]:
        """Return the steps and values of all rows that have a value of this name."""
        return zip(*((row["step"], row[name]) for row in rows if name in row), strict=True)

    figure = new_figure(11, 4.4)
    left, right = figure.subplots(1, 2)
    if any("loss" in row for row in rows):
        left.plot(*column("loss"), color="#2a7de1", linewidth=1.2, label="loss")
        left.plot(*column("tv"), color="#9aa5b1", linewidth=1.2, label="total variation = 1 - expected acceptance")
        left.legend(frameon=False)
    left.set(title="Loss", xlabel="step", ylim=(0, None))
    right.plot(*column("acceptance_length"), color="#2a7de1", marker="o", markersize=3)
    right.set(title=f"Acceptance length on held-out prompts, greedy, K = {num_speculative_tokens}", xlabel="step")
    right.set_ylim(1, num_speculative_tokens + 1)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
    with whole(path) as partial:
        figure.savefig(partial, dpi=150)
