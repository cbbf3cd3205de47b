"""The training loop: steps, measurements, checkpoints, and a draft on disk whenever it is the best so far."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints import orbax
from checkpoints.reading import read_json, told
from jaxspec.engine.setup import Model
from jaxspec.errors import UserError
from jaxspec.progress import say, training_progress
from jaxspec.train import methods
from jaxspec.train.ahead import ahead
from jaxspec.train.loss import computed
from jaxspec.train.options import TrainOptions
from jaxspec.train.plot import draw
from jaxspec.train.setup import Setup, measurer, prepare, teacher
from jaxspec.train.step import State, dense_backend, first_state, learning_rate, make_step, place_rows
from jaxspec.writing import disk_errors, whole

RECIPE, JOURNAL, CURVES, WORK = "recipe.json", "metrics.jsonl", "curves.png", "training"
ROWS = "rows"  # of recipe.json: which ones the data made
METRIC = "acceptance_length"  # which draft is best
LOG_EVERY = 10  # steps between lines of the journal; reading a number waits for its step
SHARE_OF_STEPS = 0.93  # of the minutes that are given; the rest is for measurements
MAY_DIFFER = ("out", "resume", "minutes", "data")  # between a run and its resumption


def train(options: TrainOptions) -> Path:
    """Trains a draft; returns the folder that `speculative_config={"model": ...}` takes.

    The folder holds the best draft so far, recipe.json, metrics.jsonl and curves.png; training/ in it, the checkpoints
    that `resume` needs, may be removed. A run that was ended continues with the very numbers that it would have had:
    batches depend on (seed, step) alone, and checkpoints hold all else.

    Raises: UserError, FileExistsError or FileNotFoundError with one line that names what is wrong.
    """
    started = time.perf_counter()
    check_folder(options)
    setup = prepare(options)
    known = {**recipe(options), ROWS: setup.rows.digest}
    if options.resume and (begun := read_json(options.out / RECIPE).get(ROWS, known[ROWS])) != known[ROWS]:
        raise UserError(
            f"--resume: {options.data} makes rows {known[ROWS]}, the run was begun with {begun}: give the data as it "
            "was, or begin anew in another folder"
        )
    target, batch = teacher(setup)
    options.out.mkdir(parents=True, exist_ok=True)
    with whole(options.out / RECIPE) as partial:
        partial.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    history = orbax.History(options.out / WORK, METRIC)
    try:
        run(setup, target, batch, history, started)
    finally:
        history.close()
    return options.out


def kept(options: TrainOptions) -> str:
    """What an interrupt leaves of `train`, and how to go on, in words."""
    again = "the same command" + ("" if options.resume else " with --resume")
    steps = [int(path.name) for path in (options.out / WORK).glob("*") if path.name.isdecimal()]
    if steps:
        return f"step {max(steps)} is kept in {options.out}: {again} goes on from there"
    if (options.out / RECIPE).is_file():
        return f"{options.out} keeps no step yet: {again} begins anew"
    return "no step was made: the same command begins anew, with what the target has said of the data so far"


def recipe(options: TrainOptions) -> dict[str, Any]:
    """The options as JSON holds them, but for where and when."""
    fields = dataclasses.asdict(options)
    return {name: value for name, value in fields.items() if name not in MAY_DIFFER}


def check_folder(options: TrainOptions) -> None:
    """A run needs an empty folder; a resumption one that was begun with the same options."""
    path = options.out / RECIPE
    if not options.resume:
        orbax.check_free(options.out)
        return
    if not path.is_file():
        raise FileNotFoundError(f"--resume: {path} is missing, so no run was begun there: leave --resume out")
    begun = read_json(path)
    for name, value in recipe(options).items():
        if begun.get(name) != value:
            option = "--" + name.replace("_", "-")
            raise UserError(f"--resume with {option} {value}, but the run was begun with {begun.get(name)}: use that")


def run(setup: Setup, target: Model, batch: Callable[[int], Any], history: orbax.History, started: float) -> None:
    """target, batch: of `teacher`."""
    o, everywhere = setup.options, setup.devices.sharding()
    state, at, begun = first_state(setup.draft, o, everywhere), 0, history.last
    if begun is not None:
        state, at = history.load(begun, state), begun
        say(f"resuming after step {at}")
    journal = Journal(o.out / JOURNAL, begun)

    config = setup.draft.config
    fixed = jax.device_put((setup.frozen, target.params), everywhere)
    backend = dense_backend(config, setup.device, setup.dtype)
    step = make_step(target.config, config, o, backend, setup.dtype)
    place, measure = place_rows(setup.devices), measurer(setup)
    size = sum(x.size for x in state.params.values())
    say(f"{size / 1e6:.2f} million parameters, {len(setup.rows)} rows, {len(jax.devices())} devices")

    def keep(at: int, state: State) -> None:
        """Measures, writes the draft where it is the best so far, saves, draws."""
        params = computed({**state.params, **setup.ids}, jax.numpy.bfloat16)  # as it is stored and measured
        found = measure(params)
        length, best = found.mean_acceptance_length, history.best
        if best is None or length > best:
            methods.implementation(o.method).save(o.out, params, config, setup.fingerprint)
        history.save(at, state, {METRIC: length})
        accepted = [n / max(found.num_drafts, 1) for n in found.num_accepted_tokens_per_pos]
        journal.add({"step": at, METRIC: length, "accepted_per_position": accepted})
        draw(journal.rows, o.out / CURVES, num_speculative_tokens=o.num_speculative_tokens)
        say(f"step {at}: acceptance length {length:.3f}, best {max(length, best or 0):.3f}{journal.losses()}")

    window: list[dict[str, jax.Array]] = []
    total = journal.total or o.steps
    late, deadline = False, None if o.minutes is None else started + 60 * o.minutes
    with (
        training_progress(total) as report,
        contextlib.closing(ahead(lambda at: place(batch(at)), itertools.count(at))) as batches,
    ):
        if begun is None:
            keep(at, state)
        since, resumed = time.perf_counter(), at
        while at < total and not late:
            rate = learning_rate(o, at, total)
            state, metrics = step(state, rate, fixed, next(batches))
            at += 1
            window.append(metrics)
            late = deadline is not None and time.perf_counter() > deadline
            measuring = at % o.eval_every == 0 or at == total or late
            if at % LOG_EVERY == 0 or measuring:
                means = {name: float(np.mean([m[name] for m in jax.device_get(window)])) for name in metrics}
                each = (time.perf_counter() - since) / len(window)
                if not np.isfinite(means["loss"]):
                    raise UserError(f"the loss is no number at step {at}: lower --learning-rate, and begin anew")
                clocks = {"step_seconds": each, "seconds": time.perf_counter() - started}
                journal.add({"step": at, **means, "learning_rate": rate, **clocks})
                report(at, f"loss {means['loss']:.3f}, expected acceptance {1 - means['tv']:.3f}")
                if deadline and not late and at - resumed >= 3 * LOG_EVERY and journal.total is None:  # none compiled
                    total = steps_that_fit(total, at, each, deadline - time.perf_counter())
                    journal.add({"step": at, "total": total})
                    say(f"{1e3 * each:.0f} ms a step: {total} steps")
                window.clear()
            if measuring:
                keep(at, state)
            if not window:
                since = time.perf_counter()
    if at < total:
        say(f"--minutes {o.minutes:g} are over: stopped after step {at} of {total}; --resume goes on")


def steps_that_fit(total: int, at: int, each: float, left: float) -> int:
    """Steps in all, at most `total`, after `at` of them; each, left: seconds a step takes, and that remain."""
    return min(total, at + max(1, int(SHARE_OF_STEPS * left / each)))


class Journal:
    """metrics.jsonl: a line for every few steps and for every measurement."""

    def __init__(self, path: Path, begun: int | None) -> None:
        """Keeps what there is up to the step from which a run goes on."""
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may have been cut off
        last = -1 if begun is None else begun
        with told(path):
            self.path, self.rows = path, [row for row in map(json.loads, lines) if row["step"] <= last]
        with whole(path) as partial:
            partial.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")

    @property
    def total(self) -> int | None:
        """How many steps fit into the minutes, where that was found already."""
        return next((row["total"] for row in self.rows if "total" in row), None)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def losses(self) -> str:
        """The newest means in words."""
        row: dict[str, Any] = next((row for row in reversed(self.rows) if "loss" in row), {})
        return "".join(f", {name} {row[name]:.3f}" for name in ("loss", "tv", "agree", "lost") if row)
