"""Figures drawn with matplotlib, which comes with jaxspec's extra "plots" and is imported when something is drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from jaxspec.common.errors import UserError
from jaxspec.common.package import remedy


def missing() -> str:
    """Return a message with the remedy if matplotlib is not installed, else an empty string."""
    return "" if importlib.util.find_spec("matplotlib") else f"pictures need matplotlib: {remedy('plots')}"


def check_plot(path: Path) -> None:
    """Check the file that --plot names, before anything is measured.

    Raises: UserError for a name that is not *.png, or if matplotlib is not installed; FileNotFoundError if the file's
    folder does not exist.
    """
    if path.suffix != ".png":
        raise UserError(f"--plot {path}: the picture is a PNG, give a name that ends in .png")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"--plot {path}: the folder {path.absolute().parent} does not exist: make it first")
    if line := missing():
        raise UserError(f"--plot {path}: {line}")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches. It needs no window, whatever matplotlib backend the user has set.

    Raises: UserError if matplotlib is not installed.
    """
    if line := missing():
        raise UserError(line)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
