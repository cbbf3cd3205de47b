"""The training loop: steps, measurements and checkpoints. Each draft that is the best so far is written to disk."""

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
from checkpoints.reading import naming_file, read_json
from jaxspec.common.errors import UserError
from jaxspec.common.plots import missing
from jaxspec.common.progress import Work, working, write_line
from jaxspec.common.values import flag_of
from jaxspec.common.writing import disk_errors, whole
from jaxspec.train import methods
from jaxspec.train.ahead import ahead
from jaxspec.train.loss import computed
from jaxspec.train.plot import draw
from jaxspec.train.preparation import Teacher, measurer, prepare, teacher
from jaxspec.train.step import dense_backend, first_state, learning_rate, make_step, place_rows
from jaxspec.train.train_options import TrainOptions

RECIPE, JOURNAL, CURVES, WORK = "recipe.json", "metrics.jsonl", "curves.png", "training"
ROWS = "rows"  # entry of recipe.json: the hash of the training rows
METRIC = "acceptance_length"  # metric by which the best draft is chosen
LOG_EVERY = 10  # steps between two lines of metrics.jsonl; not 1, because reading a metric waits for its step
SHARE_OF_MINUTES = 0.97  # share of the time left of --minutes for which steps and measurements are planned
MAY_DIFFER = ("out", "resume", "minutes", "data")  # options that may have another value when a run is resumed


def train(options: TrainOptions) -> Path:
    """Train a draft and return its folder, which `speculative_config={"model": ...}` takes.

    The folder holds the best draft so far, recipe.json, metrics.jsonl and curves.png. Its subfolder training/ holds the
    checkpoints that `resume` needs, and may be removed. A resumed run computes the same numbers as one that was never
    stopped, because batches depend on (seed, step) alone and checkpoints hold all other state.

    Raises: UserError, FileExistsError or FileNotFoundError with one line that names what is wrong.
    """
    seconds = math.inf if options.minutes is None else 60 * options.minutes
    deadline = time.perf_counter() + seconds
    check_folder(options)
    with working("training", options.steps, unit="steps", most=seconds) as work:
        return trained(options, deadline, work)


def trained(options: TrainOptions, deadline: float, work: Work) -> Path:
    """Set up the run, make its steps until the deadline, and return the draft's folder.

    deadline: a time of time.perf_counter. work: the progress display.

    Raises: UserError if a resumed run has other training rows than before, and as `train` does.
    """
    work.report(0, "loading")
    setup = prepare(options)
    digest = setup.rows.digest
    known = {**recipe(options), ROWS: digest}
    if options.resume:
        begun = read_json(options.out / RECIPE).get(ROWS, digest)
        if begun != digest:
            raise UserError(
                f"--resume: {options.data} gives rows with the digest {digest}, the run was started with {begun}: give "
                "the same data, or start a run in another folder"
            )
    target = teacher(setup)
    options.out.mkdir(parents=True, exist_ok=True)
    with whole(options.out / RECIPE) as partial:
        partial.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    history = orbax.History(options.out / WORK, METRIC)
    try:
        run(target, history, deadline, work)
    finally:
        history.close()
    return options.out


def kept(options: TrainOptions) -> str:
    """Return a message that says what an interrupted `train` has saved, and how to go on."""
    again = "the same command" + ("" if options.resume else " with --resume")
    steps = [int(path.name) for path in (options.out / WORK).glob("*") if path.name.isdecimal()]
    if steps:
        return f"step {max(steps)} is saved in {options.out}: {again} continues from there"
    if (options.out / RECIPE).is_file():
        return f"{options.out} holds no step yet: {again} starts from the beginning"
    return "no step was made: the same command starts again, and reuses what the target has computed so far"


def recipe(options: TrainOptions) -> dict[str, Any]:
    """Return the options that must be the same when a run is resumed, in the form in which JSON holds them."""
    fields = dataclasses.asdict(options)
    return {name: value for name, value in fields.items() if name not in MAY_DIFFER}


def check_folder(options: TrainOptions) -> None:
    """Raise an error unless the output folder is empty or, with `resume`, holds a run with the same options.

    Raises: FileExistsError, FileNotFoundError or UserError.
    """
    path = options.out / RECIPE
    if not options.resume:
        orbax.check_free(options.out)
        return
    if not path.is_file():
        raise FileNotFoundError(f"--resume: {path} is missing, so no run was started there: leave --resume out")
    begun = read_json(path)
    for name, value in recipe(options).items():
        if begun.get(name) != value:
            raise UserError(
                f"--resume with {flag_of(name)} {value}, but the run was started with {begun.get(name)}: give that"
            )


def run(teacher: Teacher, history: orbax.History, deadline: float, work: Work) -> None:
    """Make the remaining training steps, as many as can be made, measured and saved before the deadline.

    teacher: the target, with its results for the training rows. history: the checkpoints. deadline: a time of
    time.perf_counter. work: the progress display.
    """
    setup = teacher.setup
    o, everywhere = setup.options, setup.devices.sharding()
    state = first_state(setup.draft, o, everywhere)
    at = 0  # number of steps done
    begun = history.last  # step of the checkpoint from which this run goes on; None for a new run
    if begun is not None:
        state = history.load(begun, state)
        at = begun
        write_line(f"resuming after step {at}")
    journal = Journal(o.out / JOURNAL, begun)

    config = setup.draft.config
    fixed = jax.device_put((setup.frozen, teacher.target.params), everywhere)
    backend = dense_backend(config, setup.device, setup.dtype)
    step = make_step(teacher.target.config, config, o, backend, setup.dtype)
    place = place_rows(setup.devices)
    measure = measurer(setup)
    size = sum(x.size for x in state.params.values())
    write_line(f"{size / 1e6:.2f} million parameters, {len(setup.rows)} rows, {len(jax.devices())} devices")
    if without_plots := missing():
        write_line(f"{CURVES} is left out: {without_plots}")

    total = journal.total or o.steps
    saved = begun  # step of the newest checkpoint
    window: list[dict[str, jax.Array]] = []  # metrics of the steps since the last line of metrics.jsonl
    since = time.perf_counter()  # time at which these steps began
    each = 0.0  # seconds that a step takes
    last = 0.0  # seconds that the newest measurement took, with writing but without compiling
    newest = ""  # newest means of the metrics, for the progress display

    def over(seconds: float = 0.0) -> bool:
        """Return whether, so many seconds from now, no time is left for a step and a measurement."""
        return time.perf_counter() + seconds + each + last > deadline

    def ready_steps() -> Iterator[int]:
        """Yield the indices of the remaining steps, each after the target's results for it. End if the time is up."""
        for i in range(at, o.steps):
            if (i == at or i % LOG_EVERY == 0) and not teacher.ask(i, LOG_EVERY - i % LOG_EVERY, over):
                return
            yield i

    def keep() -> None:
        """Measure the draft, write its folder if it is the best so far, save a checkpoint, and draw the curves."""
        nonlocal saved, last
        work.report(at, "measuring")
        begin = time.perf_counter()
        saved = at
        # Drafts are stored, and so measured, in bfloat16.
        params = computed({**state.params, **setup.ids}, jax.numpy.bfloat16)
        found, compiling = measure(params)
        length = found.mean_acceptance_length
        best = history.best  # acceptance length of the best earlier checkpoint
        if best is None or length > best:
            methods.implementation(o.method).save(o.out, params, config, setup.fingerprint)
        history.save(at, state, {METRIC: length})
        accepted = [n / max(found.num_drafts, 1) for n in found.num_accepted_tokens_per_pos]
        journal.add({"step": at, METRIC: length, "accepted_per_position": accepted})
        if not without_plots:
            draw(journal.rows, o.out / CURVES, num_speculative_tokens=o.num_speculative_tokens)
        write_line(f"step {at}: acceptance length {length:.3f}, best {max(length, best or 0):.3f}{journal.losses()}")
        last = time.perf_counter() - begin - compiling

    def log() -> None:
        """Write the means of the newest steps' metrics. Plan the number of steps once the time of a step is known."""
        nonlocal each, newest, total
        means = {name: float(np.mean([m[name] for m in jax.device_get(window)])) for name in window[0]}
        now = time.perf_counter()
        each = (now - since) / len(window)
        if not np.isfinite(means["loss"]):
            raise UserError(f"the loss is not finite at step {at}: lower --learning-rate, and start a new run")
        clocks = {"step_seconds": each, "seconds": work.seconds}
        journal.add({"step": at, **means, "learning_rate": learning_rate(o, at - 1, total), **clocks})
        newest = f"loss {means['loss']:.3f}, expected acceptance {1 - means['tv']:.3f}"
        compiled = at - (begun or 0) > LOG_EVERY  # else the time of these steps includes compiling
        if deadline < math.inf and compiled and journal.total is None:
            total = steps_that_fit(total, at, each, deadline - now, o.eval_every, last)
            journal.add({"step": at, "total": total})
            write_line(f"{1e3 * each:.0f} ms a step: {total} steps")
        work.report(at, newest, total)
        window.clear()

    with contextlib.closing(ahead(lambda at: place(teacher.batch(at)), ready_steps())) as batches:
        if begun is None:
            keep()
        work.report(at, "compiling")
        since = time.perf_counter()
        while at < total and not over():
            batch = next(batches, None)
            if batch is None:
                break
            state, metrics = step(state, learning_rate(o, at, total), fixed, batch)
            at += 1
            jax.block_until_ready(window[-1:])  # wait, so that at most one step is still running on the device
            window.append(metrics)
            work.report(at, newest)
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
        write_line(f"--minutes {o.minutes:g} are over: stopped after step {at} of {total}; --resume continues")


def steps_that_fit(total: int, at: int, each: float, left: float, eval_every: int, last: float) -> int:
    """Return the number of steps that fit into the time, those already made included; at most `total`.

    At least one more step is planned.

    at: steps already made. each: seconds of a step. last: seconds of a measurement. left: seconds that remain.
    eval_every: steps between measurements; there is one more measurement at the end.
    """
    more = int(SHARE_OF_MINUTES * (left - last) / (each + last / eval_every))
    return min(total, at + max(1, more))


class Journal:
    """The file metrics.jsonl of a run, with a line for every few steps and for every measurement."""

    def __init__(self, path: Path, begun: int | None) -> None:
        """Read the file, and drop its lines after step `begun`, from which the run goes on; None drops all lines."""
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # without a last line that was written only in part
        last = -1 if begun is None else begun
        self.path = path
        with naming_file(path):
            self.rows = [row for row in map(json.loads, lines) if row["step"] <= last]
        with whole(path) as partial:
            partial.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")

    @property
    def total(self) -> int | None:
        """The number of steps planned within --minutes, None if it is not planned yet."""
        return next((row["total"] for row in self.rows if "total" in row), None)

    def add(self, row: dict[str, Any]) -> None:
        """Append a line to the file. Raises: DiskError if it cannot be written."""
        self.rows.append(row)
        with disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def losses(self) -> str:
        """Return the newest mean losses and metrics as text, empty if there are none."""
        row: dict[str, Any] = next((row for row in reversed(self.rows) if "loss" in row), {})
        return "".join(f", {name} {row[name]:.3f}" for name in ("loss", "tv", "agree", "lost") if row)
