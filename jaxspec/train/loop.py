"""The training loop: steps, measurements, checkpoints, and a draft on disk whenever it is the best so far."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints import orbax
from checkpoints.reading import read_json, told
from jaxspec.common.errors import UserError
from jaxspec.common.progress import Work, say, working
from jaxspec.common.writing import disk_errors, whole
from jaxspec.train import methods
from jaxspec.train.ahead import ahead
from jaxspec.train.loss import computed
from jaxspec.train.options import TrainOptions
from jaxspec.train.plot import draw
from jaxspec.train.setup import Teacher, measurer, prepare, teacher
from jaxspec.train.step import dense_backend, first_state, learning_rate, make_step, place_rows

RECIPE, JOURNAL, CURVES, WORK = "recipe.json", "metrics.jsonl", "curves.png", "training"
ROWS = "rows"  # of recipe.json: which ones the data made
METRIC = "acceptance_length"  # which draft is best
LOG_EVERY = 10  # steps between lines of the journal; reading a number waits for its step
SHARE_OF_MINUTES = 0.97  # that steps and measurements are planned for
MAY_DIFFER = ("out", "resume", "minutes", "data")  # between a run and its resumption


def train(options: TrainOptions) -> Path:
    """Trains a draft; returns the folder that `speculative_config={"model": ...}` takes.

    The folder holds the best draft so far, recipe.json, metrics.jsonl and curves.png; training/ in it, the checkpoints
    that `resume` needs, may be removed. A run that was ended continues with the very numbers that it would have had:
    batches depend on (seed, step) alone, and checkpoints hold all else.

    Raises: UserError, FileExistsError or FileNotFoundError with one line that names what is wrong.
    """
    seconds = math.inf if options.minutes is None else 60 * options.minutes
    deadline = time.perf_counter() + seconds
    check_folder(options)
    with working("training", options.steps, unit="steps", most=seconds) as work:
        return trained(options, deadline, work)


def trained(options: TrainOptions, deadline: float, work: Work) -> Path:
    work.report(0, "loading")
    setup = prepare(options)
    known = {**recipe(options), ROWS: setup.rows.digest}
    if options.resume and (begun := read_json(options.out / RECIPE).get(ROWS, known[ROWS])) != known[ROWS]:
        raise UserError(
            f"--resume: {options.data} makes rows {known[ROWS]}, the run was begun with {begun}: give the data as it "
            "was, or begin anew in another folder"
        )
    taught = teacher(setup)
    options.out.mkdir(parents=True, exist_ok=True)
    with whole(options.out / RECIPE) as partial:
        partial.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    history = orbax.History(options.out / WORK, METRIC)
    try:
        run(taught, history, deadline, work)
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


def run(teacher: Teacher, history: orbax.History, deadline: float, work: Work) -> None:
    """Make the steps that are left, and that are done, measured and saved before the deadline, of time.perf_counter."""
    setup = teacher.setup
    o, everywhere = setup.options, setup.devices.sharding()
    state, at, begun = first_state(setup.draft, o, everywhere), 0, history.last
    if begun is not None:
        state, at = history.load(begun, state), begun
        say(f"resuming after step {at}")
    journal = Journal(o.out / JOURNAL, begun)

    config = setup.draft.config
    fixed = jax.device_put((setup.frozen, teacher.target.params), everywhere)
    backend = dense_backend(config, setup.device, setup.dtype)
    step = make_step(teacher.target.config, config, o, backend, setup.dtype)
    place, measure = place_rows(setup.devices), measurer(setup)
    size = sum(x.size for x in state.params.values())
    say(f"{size / 1e6:.2f} million parameters, {len(setup.rows)} rows, {len(jax.devices())} devices")

    total, saved = journal.total or o.steps, begun
    window: list[dict[str, jax.Array]] = []  # metrics of the steps since the last line of the journal
    since = time.perf_counter()  # when these began
    each, last = 0.0, 0.0  # seconds that a step takes, and a measurement with all that it writes
    said = ""  # of the newest means

    def over(seconds: float = 0.0) -> bool:
        """Whether no step can be made any more after so many seconds."""
        return time.perf_counter() + seconds + each + last > deadline

    def asked() -> Iterator[int]:
        """The steps to come, once the target has said what they learn."""
        for i in range(at, o.steps):
            if (i == at or i % LOG_EVERY == 0) and not teacher.ask(i, LOG_EVERY - i % LOG_EVERY, over):
                return
            yield i

    def keep() -> None:
        """Measures, writes the draft where it is the best so far, saves, draws."""
        nonlocal saved, last
        work.report(at, "measuring")
        begin, saved = time.perf_counter(), at
        params = computed({**state.params, **setup.ids}, jax.numpy.bfloat16)  # as it is stored and measured
        found, compiling = measure(params)
        length, best = found.mean_acceptance_length, history.best
        if best is None or length > best:
            methods.implementation(o.method).save(o.out, params, config, setup.fingerprint)
        history.save(at, state, {METRIC: length})
        accepted = [n / max(found.num_drafts, 1) for n in found.num_accepted_tokens_per_pos]
        journal.add({"step": at, METRIC: length, "accepted_per_position": accepted})
        draw(journal.rows, o.out / CURVES, num_speculative_tokens=o.num_speculative_tokens)
        say(f"step {at}: acceptance length {length:.3f}, best {max(length, best or 0):.3f}{journal.losses()}")
        last = time.perf_counter() - begin - compiling

    def log() -> None:
        """Writes the means of the last steps, and finds how many steps fit once these tell what one takes."""
        nonlocal each, said, total
        means = {name: float(np.mean([m[name] for m in jax.device_get(window)])) for name in window[0]}
        now = time.perf_counter()
        each = (now - since) / len(window)
        if not np.isfinite(means["loss"]):
            raise UserError(f"the loss is no number at step {at}: lower --learning-rate, and begin anew")
        clocks = {"step_seconds": each, "seconds": work.seconds}
        journal.add({"step": at, **means, "learning_rate": learning_rate(o, at - 1, total), **clocks})
        said = f"loss {means['loss']:.3f}, expected acceptance {1 - means['tv']:.3f}"
        if deadline < math.inf and at - (begun or 0) > LOG_EVERY and journal.total is None:  # the first ones compile
            total = steps_that_fit(total, at, each, deadline - now, o.eval_every, last)
            journal.add({"step": at, "total": total})
            say(f"{1e3 * each:.0f} ms a step: {total} steps")
        work.report(at, said, total)
        window.clear()

    with contextlib.closing(ahead(lambda at: place(teacher.batch(at)), asked())) as batches:
        if begun is None:
            keep()
        work.report(at, "compiling")
        since = time.perf_counter()
        while at < total and not over() and (batch := next(batches, None)) is not None:
            state, metrics = step(state, learning_rate(o, at, total), fixed, batch)
            at += 1
            jax.block_until_ready(window[-1:])  # no step more than the one that runs now is to be waited for
            window.append(metrics)
            work.report(at, said)
            if at % LOG_EVERY == 0 or at % o.eval_every == 0:
                log()
                if at % o.eval_every == 0 and at < total:
                    keep()
                since = time.perf_counter()
    if window:
        log()
    if saved != at:
        keep()
    if at < total:
        say(f"--minutes {o.minutes:g} are over: stopped after step {at} of {total}; --resume goes on")


def steps_that_fit(total: int, at: int, each: float, left: float, eval_every: int, last: float) -> int:
    """Return the steps in all, at most `total`, after `at` of them.

    each, last: seconds that a step and a measurement take; left: seconds that remain. There is a measurement every
    eval_every steps, and one at the end.
    """
    return min(total, at + max(1, int(SHARE_OF_MINUTES * (left - last) / (each + last / eval_every))))


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
