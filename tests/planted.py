"""Faults to plant, and the tests that have to see them.

    python -m tests.planted             # each in turn: minutes
    python -m tests.planted 3 7         # some, by number

A fault is one place of one file, changed while its tests run, in a copy of the tree. Exit status 1 where tests pass
with a fault in place.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATIENCE = 600  # seconds; a fault by which nothing ends is seen, too


@dataclasses.dataclass(frozen=True)
class Fault:
    """In file, `right` becomes `wrong`; tests: pytest's arguments."""

    file: str
    right: str
    wrong: str
    tests: str


FAULTS = (
    Fault(  # a copy begins at a page that is itself still to be copied to
        "jaxspec/engine/scheduler.py", "source.get(page, page)", "page", "tests/engine/test_scheduler.py -k copy_of"
    ),
    Fault(  # every waiting sample looks at all others
        "jaxspec/engine/scheduler.py",
        "[s for s in self.running if s.samples is request.samples]",
        "[s for s in request.samples if s is not request and s.pages]",
        "tests/engine/test_scheduler.py -k cost",
    ),
    Fault(  # a seeded request's tokens hang on how many run
        "jaxspec/engine/engine.py", " and not pinned:", ":", "tests/engine/test_seeds.py -k how_many"
    ),
    Fault(  # an interrupted step is taken for a whole one
        "jaxspec/engine/roster.py",
        "if self.midway or self.runner.lost:",
        "if self.runner.lost:",
        "tests/engine/test_faults.py -k between_any_two_lines",
    ),
    Fault(  # a top_p that float32 has no number for forbids every id
        "jaxspec/sampling/distribution.py", " | (z >= largest)", "", "tests/sampling/test_distribution.py -k largest"
    ),
    Fault(  # a stop string in front of half a character
        "jaxspec/detokenizer.py",
        "readable, known = self.text + self.unfinished, self.searched",
        "readable, known = self.text, self.searched",
        "tests/test_detokenizer.py -k another_character",
    ),
    Fault(  # ids that were fed and not kept stay in the text
        "jaxspec/detokenizer.py",
        "if start != self.num_fed:",
        "if False:",
        "tests/test_detokenizer.py -k before_an_interrupt",
    ),
    Fault(  # what a draft gives nothing is proposed
        "jaxspec/decode/round.py",
        "num_proposed=leading(possible, proposal.num_proposed))",
        "num_proposed=proposal.num_proposed)",
        "tests/engine/test_no_law.py -k standard",
    ),
    Fault(  # a draft that spoils its round is tried for ever
        "jaxspec/decode/round.py",
        "jnp.where(state.spoilt, 0, ",
        "jnp.where(state.spoilt & False, 0, ",
        "tests/engine/test_no_law.py -k spoils",
    ),
    Fault(  # attention reads slots that nobody wrote
        "jaxspec/models/paged.py",
        "kv_len, num_keys = reach(t), reach(jnp.sum(~masked, axis=1, dtype=jnp.int32))",
        "kv_len = num_keys = reach(t)",
        "tests/engine/test_no_law.py -k 'spoils or alone'",
    ),
    Fault(  # a second failure leaves callers waiting
        "jaxspec/async_llm.py",
        "with contextlib.suppress(BaseException):\n                self.inbox.get_nowait()()",
        "with contextlib.suppress(queue.Empty):\n                self.inbox.get_nowait()()",
        "tests/test_async.py -k second_failure",
    ),
)


def seen(fault: Fault) -> bool:
    """Whether the fault's tests fail, or do not end, with it in place."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "*_cache", ".hypothesis"))
        path = tree / fault.file
        path.write_text(path.read_text(encoding="utf-8").replace(fault.right, fault.wrong), encoding="utf-8")
        command = f"{sys.executable} -m pytest -q -x -n0 -p no:cacheprovider {fault.tests}"
        try:
            done = subprocess.run(
                ["timeout", str(PATIENCE), "sh", "-c", f"exec {command}"],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},
                capture_output=True,
                text=True,
            )
        except FileNotFoundError:
            raise SystemExit("this needs the `timeout` command") from None
    if done.returncode not in (0, 1, 124):
        raise RuntimeError(f"{fault.tests}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode != 0


def main(arguments: Sequence[str] = ()) -> int:
    missed = 0
    for number, fault in enumerate(FAULTS):
        if arguments and str(number) not in arguments:
            continue
        found = seen(fault)
        missed += not found
        print(f"{number:3} {'seen' if found else 'NOT SEEN'}  {fault.file}: {fault.wrong or 'left out'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
