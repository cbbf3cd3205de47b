"""How commands end: a line and a status, whatever happened; what a person sees on standard error is ours."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
import typer

from jaxspec import cli
from jaxspec.cli import exits
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.parallel.absent import may_have_tpu
from tests.support.root import ROOT
from tests.support.sizes import cases
from tests.train import runs

HINT = f"({exits.OUR_FAULT})"
LONG = 300  # seconds: what takes longer does not end


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """target and data of a tiny run."""
    root = tmp_path_factory.mktemp("runs")
    runs.write(root)
    return root


def xla_error() -> Exception:
    """As it really comes."""
    with pytest.raises(RuntimeError) as caught:
        jnp.zeros((1 << 23, 1 << 20), jnp.float32).block_until_ready()
    return caught.value


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("k=9 is above 8:\n  lower it"), 2, "k=9 is above 8: lower it"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x.json"), 2, "[Errno 2] No such file: 'x.json'"),
        (UnsupportedError("later"), 2, "later"),
        (MemoryError(), 2, f"out of memory: {exits.LESS}"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyboardInterrupt("2 shards kept"), 130, "interrupted: 2 shards kept"),
        (exits.Terminated(), 143, "interrupted"),
    ],
    ids=repr,
)
def test_one_line_and_a_status(capsys, error, code, line):
    def run() -> None:
        raise error

    assert exits.status(run) == code
    assert capsys.readouterr() == ("", f"jaxspec: {line}\n")


def jax_error() -> Exception:
    """A ValueError of JAX's own."""
    with pytest.raises(ValueError, match="broadcasting") as caught:
        jnp.broadcast_to(jnp.zeros(3), (2,))
    return caught.value


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError(2), "KeyError: 2"),
        (ValueError("two shapes differ"), "ValueError: two shapes differ"),
        (NotImplementedError("lowering"), "NotImplementedError: lowering"),
        (UserError(), "UserError"),
        (RuntimeError("a row ended"), "RuntimeError: a row ended"),
        (jax_error(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_nobody_can_mend_shows_its_traceback(capsys, error, line):
    def run() -> None:
        raise error

    assert exits.status(run) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith(f"\njaxspec: {line} {HINT}\n" if line else f" {HINT}\n")


def test_a_device_without_room(capsys):
    error = xla_error()
    assert "RESOURCE_EXHAUSTED" in str(error)
    assert exits.failure(error) == (2, f"out of memory ({str(error).splitlines()[0]}): {exits.LESS}")


def test_lines_end(capsys):
    exits.print_error("word " * 10_000)
    assert len(capsys.readouterr().err) < 700


def test_other_statuses():
    def ended() -> None:
        raise typer.Exit(2)

    assert exits.status(ended) == 2
    assert exits.status(lambda: None) == 0


def test_the_traceback_is_kept_of_what_nobody_foresaw(monkeypatch):
    monkeypatch.setenv("JAXSPEC_DEBUG", "1")
    with pytest.raises(KeyError):
        exits.status(lambda: {}[2])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate x --max-token 3", "--max-tokens"),
        ("generate", "Missing argument 'PROMPT...'"),
        ("nothing", "No such command 'nothing'"),
        ("generate x -k many", "a valid integer"),
        ("generate x --method magic", "--method"),
        ("info a b", "unexpected extra argument"),
    ],
)
def test_usage_is_one_line_too(capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(words.split())
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("jaxspec: ")
    assert message in line
    assert "--help lists the options" in line


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook
    assert exits.status(lambda: None) == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook) == before


# As programs of their own.

PROGRAM = [sys.executable, "-m", "jaxspec.cli"]
OURS = r"""(jaxspec: |loading |\d+ tokens, |converting |the target's \d+ most probable|step \d+: """
OURS += r"""|[\d.]+ million parameters|measuring |making |  \w+ \(batch|"""
OURS += r"""(compiling|generating|writing|training|finding)[^:]*: [\d,]+ ).*"""


def environment(**more: str) -> dict[str, str]:
    """JAX chooses, as it does for a person."""
    given = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "HF_HUB_OFFLINE")}
    return given | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | more


def start(*words: str, **more: str) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*PROGRAM, *words], env=environment(**more), text=True, **pipes)


def check_ours(err: str) -> None:
    for line in err.splitlines():
        assert re.fullmatch(OURS, line), err


def stopped(process: subprocess.Popen[str], pattern: str, number: int, wait: float = 0.2) -> tuple[str, str]:
    """Sends the signal `wait` seconds after a line of standard error that is like the pattern."""
    seen = ""
    with process:
        assert process.stderr
        for line in process.stderr:
            seen += line
            if re.search(pattern, line):
                break
        else:
            pytest.fail(f"it ended: {seen}")
        time.sleep(wait)
        process.send_signal(number)
        out, err = process.communicate(timeout=LONG)
    return out, seen + err


libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None or may_have_tpu(), reason="needs libtpu, and no TPU"
)


@libtpu
@cases("words", ["info {}", "generate x --model {} --max-tokens 4", "convert {} {}-{}"], quick=["info {}"])
def test_a_person_sees_only_our_lines(folder, words, tmp_path):
    target = str(folder / "target")
    given = [word.replace("{}-{}", str(tmp_path / "out")).replace("{}", target) for word in words.split()]
    process = start(*given)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, err
    check_ours(err)
    assert out.strip()


@libtpu
@cases(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], quick=[(signal.SIGTERM, 143)])
def test_no_stack_is_printed_where_a_command_is_ended(folder, number, code):
    """While it compiles, when libtpu would be there."""
    process = start("generate", "Once", "--model", str(folder / "target"), "--max-tokens", "400", "-n", "500")
    _, err = stopped(process, "^loading", number, wait=4)
    assert process.returncode == code, err
    check_ours(err)
    assert err.splitlines()[-1] == "jaxspec: interrupted"


def data_command(folder: Path, out: Path) -> list[str]:
    options = "--tokens 100000000 --length 64 --shard-size 8 --rows 8 --mixture free:1"
    return ["generate-data", "--target", str(folder / "target"), "--out", str(out), *shlex.split(options)]


@pytest.mark.thorough
@cases(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], quick=[(signal.SIGINT, 130)])
def test_the_first_interrupt_ends_generate_data(folder, tmp_path, number, code):
    out = tmp_path / "data"
    process = start(*data_command(folder, out))
    end = time.monotonic() + LONG
    while len(list(out.glob("shard-*.npz"))) < 3:
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    printed, err = process.communicate(timeout=LONG)
    assert (process.returncode, printed) == (code, ""), err
    kept = json.loads((out / "manifest.json").read_text())
    held = f"{kept['sequences']:,} sequences with {kept['tokens']:,} tokens are saved in {out}"
    assert err.splitlines()[-1] == f"jaxspec: interrupted: {held}: the same command continues from there"
    check_ours(err)


@pytest.mark.thorough
def test_what_was_interrupted_before_the_first_shard(folder, tmp_path):
    process = start(*data_command(folder, tmp_path / "data"))
    _, err = stopped(process, "^loading", signal.SIGINT)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == f"jaxspec: interrupted: no sequence was finished, and {tmp_path / 'data'} holds none"


@pytest.mark.thorough
def test_the_first_interrupt_ends_train_draft(folder, tmp_path):
    """And what its line says to do works."""
    out = tmp_path / "draft"
    shape = "--layers 1 --width 48 --heads 6 --kv-heads 2 --mlp-width 96 --vocab-size 200 --batch-size 8 --length 64"
    course = "--steps 100000 --eval-every 20 --eval-prompts 2 --eval-tokens 8 --warmup 10"
    where = ["--target", str(folder / "target"), "--data", str(folder / "data"), "--out", str(out)]
    words = ["train-draft", *where, *shlex.split(f"{shape} {course}")]
    process = start(*words)
    _, err = stopped(process, "^step 20: ", signal.SIGINT)
    assert process.returncode == 130, err
    check_ours(err)
    found = re.fullmatch(
        rf"jaxspec: interrupted: step (\d+) is saved in {out}: the same command with --resume continues from there",
        err.splitlines()[-1],
    )
    assert found, err
    process = start(*words, "--resume")
    _, err = stopped(process, "^resuming after step", signal.SIGTERM)
    assert f"resuming after step {found[1]}\n" in err
    assert process.returncode == 143
    assert re.search(r"step \d+ is saved in \S+: the same command continues from there$", err.splitlines()[-1])


def test_an_interrupt_that_python_drops_comes_again():
    """In a callback of the garbage collector, where JAX has one, an exception is written down and forgotten."""

    def check(code: str) -> None:
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=LONG)
        assert (done.returncode, done.stderr) == (130, "jaxspec: interrupted\n")

    code = """
import gc, os, signal, sys, time
from jaxspec.cli import exits

def run():
    def callback(phase, info):
        gc.callbacks.remove(callback)  # once: Python collects again when it ends
        signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(600)

sys.exit(exits.status(run))
"""
    check(code)
    # The signal comes while what sends it is still at work.
    slow = (
        "exits.threading.Thread.start = lambda self, start=exits.threading.Thread.start: (start(self), time.sleep(0.1))"
    )
    check(code.replace("def run", f"{slow}\n\ndef run"))


@pytest.mark.thorough
def test_a_reader_that_leaves(folder):
    """jaxspec ... | head -c 1"""
    for words in (["generate", "x", "--max-tokens", "300", "--model"], ["info"]):
        with start(*words, str(folder / "target")) as process:
            assert process.stdout
            if words[0] == "generate":
                process.stdout.read(1)
            process.stdout.close()
            assert process.stderr
            check_ours(process.stderr.read())
        assert process.returncode in (0, 1)


def test_what_failed_does_not_stay(folder):
    """Threads of orbax wait for ten minutes where the folder cannot be written."""
    with start("convert", str(folder / "target"), "/proc/none") as process:
        out, err = process.communicate(timeout=LONG)
    assert (process.returncode, out) == (2, "")
    assert err.splitlines()[-1].startswith("jaxspec: ")
    assert "/proc/" in err
