"""What long work says: nothing where it is soon over, else a bar that moves by itself, or a line now and then."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from jaxspec.common import progress
from tests.server.running import wait


class Screen(io.StringIO):
    """Standard error, of a terminal or not."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal  # type: ignore[method-assign]


@pytest.fixture
def screen(monkeypatch):
    """Makes standard error one, on which progress is shown at once."""

    def make(*, terminal: bool = False) -> Screen:
        monkeypatch.setattr(sys, "stderr", found := Screen(terminal=terminal))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(progress, "PATIENCE", 0.0)
        monkeypatch.setattr(progress, "EVERY", 0.01)
        return found

    yield make
    assert not progress.under_way
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxspec-progress"]


def test_what_is_soon_over_says_nothing(screen, monkeypatch):
    for terminal in (False, True):
        shown = screen(terminal=terminal)
        monkeypatch.undo()
        monkeypatch.setattr(sys, "stderr", shown)
        with progress.working("loading", 10) as work:
            work.report(10)
        assert shown.getvalue() == ""


def test_lines_are_written_without_a_terminal(screen):
    """Whatever the work does meanwhile: here it waits."""
    shown = screen()
    with progress.working("compiling", unit="programs") as work:
        wait(lambda: shown.getvalue())
        work.report(3, "launch, 16 rows", 40)
        wait(lambda: "launch" in shown.getvalue())
    assert "compiling: 0 s\n" in shown.getvalue()
    assert "compiling: 3 of 40 programs, 0 s, about 0 s left: launch, 16 rows\n" in shown.getvalue()


def test_bars_are_drawn_on_a_terminal(screen):
    shown = screen(terminal=True)
    with progress.working("writing", 9000, unit="tokens") as work:
        work.report(13_090, "72 tokens/s")
        wait(lambda: "72 tokens/s" in shown.getvalue())
        before = len(shown.getvalue())
        wait(lambda: len(shown.getvalue()) > before)  # it is drawn again though nothing is reported
    assert "9,000 of 9,000 tokens" in shown.getvalue(), "it does not pass its goal"
    assert "\n" not in shown.getvalue().rstrip(), "it leaves no line behind"


def test_the_innermost_work_speaks(screen):
    shown = screen()
    with progress.working("training", 100, unit="steps"):
        wait(lambda: "training" in shown.getvalue())
        with progress.working("compiling"):
            wait(lambda: "compiling" in shown.getvalue())
            count = shown.getvalue().count("training")
            wait(lambda: shown.getvalue().count("compiling") > 3)
            assert shown.getvalue().count("training") <= count + 1  # one line may have been on its way
        wait(lambda: shown.getvalue().count("training") > count + 1)


def test_a_terminal_shows_works_within_works(screen):
    shown = screen(terminal=True)
    with progress.working("training", 100, unit="steps"):
        wait(lambda: "training" in shown.getvalue())
        with progress.working("compiling"):
            wait(lambda: "compiling" in shown.getvalue())


@pytest.mark.parametrize(("enabled", "quiet"), [(False, False), (True, True)])
def test_nothing_is_shown_where_nobody_wants_it(screen, monkeypatch, enabled, quiet):
    shown = screen()
    monkeypatch.setattr(progress, "quiet", quiet)
    with progress.working("loading", enabled=enabled):
        assert not progress.under_way
    assert shown.getvalue() == ""


def test_lines_are_written_on_a_terminal_where_others_write_too(screen):
    shown = screen(terminal=True)
    with progress.warm_up_progress(beside=True) as report:
        report(1, 2, "prefill")
        wait(lambda: "compiling: 1 of 2 programs" in shown.getvalue())
    assert shown.getvalue().splitlines()[-1].startswith("compiled 1 programs in ")
    assert "\x1b" not in shown.getvalue()


def test_what_fails_leaves_nothing_behind(screen):
    screen()
    with pytest.raises(KeyboardInterrupt), progress.working("loading"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (59.4, "59 s"), (61.0, "1:01 min"), (6000.0, "100:00 min")]
)
def test_times(seconds, said):
    assert progress.clock(seconds) == said


def test_what_is_left_is_told_of_what_was_done_here():
    """Not of what was there at the start."""
    work = progress.Work("writing", 100, 50, "tokens")
    work.started -= 30
    assert work.state() == "50 of 100 tokens, 30 s"
    work.report(60)
    assert work.state() == "60 of 100 tokens, 30 s, about 2:00 min left"
    work.report(100)
    assert work.state() == "100 of 100 tokens, 30 s"


def test_bytes_are_told_in_megabytes(screen):
    shown = screen()
    with progress.byte_progress("loading weights", 540_000_000) as advance:
        for _ in range(2):
            advance(60_000_000)
        wait(lambda: "loading weights: 120 of 540 MB" in shown.getvalue())
