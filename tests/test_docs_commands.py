"""Every command line of README and docs, run with its very options: small models and presets stand under large ones'
names, and numbers that only make it last are lowered. Those of the notes are of their day: test_docs.py parses them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import checkpoints
from jaxspec import AsyncLLM, cli
from jaxspec.bench import bench_options, measure, presets
from jaxspec.bench.hardware import Hardware
from jaxspec.cli import serve as serving
from jaxspec.common import embedded
from jaxspec.demo import run as demo
from jaxspec.train import evaluate
from tests.drafters.references import eagle3, medusa
from tests.drafters.references.common import Shape
from tests.server.running import Running
from tests.support.documents import CURRENT, PAGES, blocks, commands
from tests.support.model_folders import write_model
from tests.support.sizes import cases
from tests.train import runs

# Option -> its number there -> the number here.
LOWER: dict[str, dict[str, str]] = {
    "--batch-size": {"4": "2", "16": "2", "64": "2", "128": "8"},
    "--context": {"256": "24", "512": "24", "8192": "40"},
    "--tokens": {"100000000": "100"},
    "--steps": {"5000": "2"},
    "--port": {"8000": "0"},
    "--max-model-len": {"16384": "256", "4096": "256", "2048": "256", "1024": "256"},
    "--max-num-seqs": {"64": "8"},
    "--tensor-parallel-size": {"8": "2", "16": "2"},
    "--num-processes": {"4": "1"},
    "--chips": {"v5e:2x4": "v5e:1x2"},
    "--concurrency": {"1,100": "1,2"},
}
# Command -> options that are added where they have no value there.
BRIEF: dict[str, dict[str, str]] = {
    "demo": {"--max-tokens": "4"},
    "generate": {"--max-tokens": "8"},
    "serve": {"--port": "0", "--num-pages": "64", "--max-num-seqs": "1", "--prefill-chunk": "16"},
    "bench-serve": {"--num-requests": "2", "--max-tokens": "4"},
    "bench": {"--context": "24", "--launches": "1"},
    "bench load": {"--requests": "3", "--runs": "1", "--prompt-tokens": "8,16", "--output-tokens": "2,4"},
    "generate-data": {"--shard-size": "4", "--rows": "4", "--length": "64", "--mixture": "free:1"},
    "train-draft": {"--length": "64", "--eval-prompts": "2", "--eval-tokens": "4"},
    "evaluate-draft": {"--max-tokens": "4"},
}
# Names of models there that are large, or are fetched -> the tiny one here.
STANDS_FOR = {
    embedded.MODEL: "target",
    embedded.DRAFT: "head",
    "Qwen/Qwen3-8B": "target",
    "Qwen/Qwen3-32B": "target",
    "Qwen/Qwen3-0.6B": "draft",
    "my-draft": "draft",
    "my-heads": "heads",
    "./my-model": "target",
    "./my-draft": "draft",
}
TINY, TINY_DRAFT = ((*presets.TABLE[name][:8], 8192, *presets.TABLE[name][9:]) for name in ("tiny", "tiny-draft"))
ALL = [words for page in CURRENT for words in commands(page, "jaxspec")]
SHOWN = list(dict.fromkeys(shlex.join(words) for words in ALL if len(words) > 2))  # more than a command's name
COMMANDS = {line.split()[1]: line for line in reversed(SHOWN)}  # name -> the first line that shows it
CHEAP = [COMMANDS[name] for name in ("info", "convert", "generate-data")]

# What else blocks may begin a line with -> why it is not run here.
ELSEWHERE = {
    "curl": "what it sends is sent by tests/server",
    "make": "CI runs the targets; test_docs.py looks that they and the files they name exist",
    "pip": "an installation",
    "pre-commit": "an installation of hooks, which a test reads",
    "python": "a program of the tests, as CI runs them",
    "XLA_FLAGS=--xla_cpu_max_isa=AVX2": "as CI runs it",
    "JAXSPEC_TEST_PLATFORM=gpu": "needs a GPU",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("docs")
    runs.write(root, layers=6)
    write_model(root / "draft", seed=1, layers=1)
    shape = Shape(vocab_size=320, width=32, layers=6)
    medusa.write(root / "heads", seed=1, target=shape)
    eagle3.write(root / "head", seed=1, target=shape)
    return root


@pytest.fixture
def small(root, tmp_path, monkeypatch):
    """The folder where the command is given. Its own results are not there yet; those of others are."""
    resolve = checkpoints.resolve

    def found(name: Any, **options: Any) -> checkpoints.Source:
        return resolve(str(root / STANDS_FOR[name]) if name in STANDS_FOR else name, **options)

    monkeypatch.setattr(checkpoints, "resolve", found)
    table = {name: TINY_DRAFT if name == "qwen3-0.6b" else TINY for name in presets.TABLE}
    monkeypatch.setattr(presets, "TABLE", table)
    monkeypatch.setattr(measure, "hardware", lambda dtype: Hardware(8.0, 16.0, 0.25))
    monkeypatch.setattr(bench_options, "ADAPTIVE_LENGTHS", (1.2, 3.0))
    monkeypatch.setattr(demo, "PROMPTS", {"one": "Count the words.", "two": "The quick brown fox"})
    monkeypatch.setattr(evaluate, "HELDOUT", tmp_path / "prompts.json")
    (tmp_path / "prompts.json").write_text(json.dumps({"chat": ["Hello", "One, two"]}))
    shutil.copytree(root / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SERVED = "http://127.0.0.1:8000/v1"  # where lines find a server


@contextlib.contextmanager
def a_server(root, words: list[str]) -> Iterator[list[str]]:
    """The words, with a server where they ask one."""
    if SERVED not in words:
        yield words
        return
    llm = AsyncLLM(str(root / "target"), max_num_seqs=2, num_pages=64)
    running = Running(llm)
    yield [running.url + "/v1" if word == SERVED else word for word in words]
    running.stop()
    llm.shutdown()


def ends_when_it_serves(monkeypatch) -> None:
    """A server that does is told to end as soon as it listens."""
    write = serving.write_line

    def told(line: str) -> None:
        write(line)
        if line.startswith("serving "):
            print(line)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(serving, "write_line", told)


def brief(words: list[str]) -> list[str]:
    """The command line with lower numbers."""
    _, name, *rest = words
    lowered = list(rest)
    for i, option in enumerate(rest[:-1]):
        if option in LOWER:
            lowered[i + 1] = ",".join(dict.fromkeys(LOWER[option].get(n, n) for n in rest[i + 1].split(",")))
    few = BRIEF.get("bench load" if name == "bench" and "load" in rest else name, {})
    added = [word for option, value in few.items() if option not in rest for word in (option, value)]
    return [name, *lowered, *added]


def test_they_are_found():
    """In blocks, in tables and in the text."""
    assert len(SHOWN) > 15
    assert {line.split()[1] for line in SHOWN} >= {"generate", "serve", "bench", "info", "convert", "generate-data"}
    for option in ("--preset", "--chat", "--never-slower", "--plot"):
        assert any(option in line for line in SHOWN), option


def test_no_line_is_left_out():
    lines = [line for page in PAGES for block in blocks(page, "") for line in block.splitlines()]
    for words in filter(None, (shlex.split(line, comments=True) for line in lines)):
        assert Path(words[0]).name in {"jaxspec", *ELSEWHERE}, words


@cases("line", SHOWN, quick=CHEAP)
def test_it_works(line, small, root, capsys, monkeypatch):
    words = brief(shlex.split(line))
    ends_when_it_serves(monkeypatch)
    if "--out" in words:
        shutil.rmtree(small / words[words.index("--out") + 1], ignore_errors=True)
    with a_server(root, words) as given, pytest.raises(SystemExit) as stop:
        cli.main(given)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    if "--compare-transformers" in words and importlib.util.find_spec("torch") is None:
        assert (stop.value.code, out) == (2, "")
        assert err == "jaxspec: --compare-transformers needs torch: pip install torch, or leave the option out\n"
        return
    assert stop.value.code == 0, err
    assert out.strip()
    if "--json" in words:
        json.loads(out)
    for option in ("--plot", "--out"):
        if option in words:
            assert (small / words[words.index(option) + 1]).exists()
