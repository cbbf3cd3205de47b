"""Several processes on this machine, each as if it were a host: the same tokens, and the same end for all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints
from jaxspec import LLM
from jaxspec.models.decoder import abstract_params
from jaxspec.parallel.placement import make_placement
from tests.checkpoints.files import tensors_of, write_gguf
from tests.drafters.references import medusa
from tests.drafters.references.common import Shape
from tests.parallel import member
from tests.support.model_folders import write_model
from tests.support.root import ROOT
from tests.support.sizes import cases

LONGEST = 300  # seconds within which all have ended, once one has
GENERATE = ("generate", "Count the words", "--temperature", "0", "--method", "none")


class Job:
    """Processes that run `python -m` with these words, each with what tells it which it is."""

    def __init__(self, words: Sequence[Sequence[str]], devices: int, folders: Sequence[Path]) -> None:
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"  # the last one counts
        environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
        start = lambda own, folder: subprocess.Popen(
            [sys.executable, "-m", *own],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self.processes = list(map(start, words, folders))

    def wait(self, timeout: float = 600) -> list[tuple[int, str, str]]:
        """(status, standard output, standard error) of each."""
        until = time.monotonic() + timeout
        said = [process.communicate(timeout=max(until - time.monotonic(), 1)) for process in self.processes]
        return [(p.returncode, *told) for p, told in zip(self.processes, said, strict=True)]

    def first_output(self, rank: int = 0) -> None:
        """Waits until a process says something."""
        assert self.processes[rank].stdout.read(1), self.wait()


@contextlib.contextmanager
def job(words: Sequence[Sequence[str]], devices: int = 1, folders: Sequence[Path] | None = None) -> Iterator[Job]:
    """folders: where each is started."""
    found = Job(words, devices, folders or [ROOT] * len(words))
    try:
        yield found
    finally:
        for process in found.processes:
            process.kill()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def members(task: str, count: int, *given: str) -> list[list[str]]:
    where = free_address()
    return [["tests.parallel.member", task, where, str(count), str(rank), *given] for rank in range(count)]


def commands(folder, *own: Sequence[str], words: Sequence[str] = GENERATE) -> list[list[str]]:
    """A command line of jaxspec for each process; own: what else each is given."""
    among = ["--coordinator", free_address(), "--num-processes", str(len(own)), "--tensor-parallel-size", str(len(own))]
    told = lambda rank: ["jaxspec.cli", *words, "--model", str(folder / "target"), *among, "--process-id", str(rank)]
    return [[*told(rank), *more] for rank, more in enumerate(own)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("job")
    write_model(root / "target", kv_heads=4)
    write_model(root / "draft", seed=0, layers=1, kv_heads=4)
    medusa.write(root / "heads", seed=1, target=Shape(vocab_size=320, width=32))
    (heads,) = (root / "heads").glob("*.safetensors")  # with a copy of the target's, which all processes compare
    copy = {"lm_head.weight": load_file(root / "target" / "model.safetensors")["lm_head.weight"]}
    save_file(load_file(heads) | copy, heads)
    return root


CASES = {  # processes, devices of each, the draft, into how many parts it is cut
    "two": (2, 1, "draft", 1),
    "two with two devices": (2, 2, "draft", 2),
    "four": (4, 1, "draft", 2),
    "four, a head": (4, 1, "heads", 1),
}


@cases("name", CASES, rest=["four, a head"])
def test_the_same_tokens(folder, name):
    """As one process has: greedy, seeded, penalised, preempted, aborted, coming later."""
    count, devices, draft, degree = CASES[name]
    speculative = {"model": str(folder / draft), "num_speculative_tokens": 3, "adaptive": False}
    cut = {"speculative_config": speculative | {"draft_tensor_parallel_size": degree}}
    with job(members("serve", count, str(folder / "target"), json.dumps(cut)), devices) as found:
        expected = member.serve(LLM(str(folder / "target"), speculative_config=speculative, **member.OPTIONS))
        ended = found.wait()
    assert {status for status, *_ in ended} == {0}, ended
    documents = [line for line in ended[0][1].splitlines() if line.startswith("{")]
    (seen,) = map(json.loads, documents)
    assert seen["tokens"] == expected["tokens"]
    assert seen["reasons"] == expected["reasons"]
    assert seen["preemptions"] > 0
    assert seen["pages"] == member.OPTIONS["num_pages"]
    assert seen["accepted"] > 0
    assert seen["refused"] == [
        "several processes run one engine: restart them with the other speculative_config",
        "these processes run a model already: make one LLM in a job of several processes",
        "this process has joined its job already: call join_hosts once",
    ]
    for _, out, _ in ended[1:]:
        assert "{" not in out, "it is for process 0 to go on with the script"


@pytest.mark.thorough
def test_a_command(folder):
    """Only process 0 prints, and its result alone is on standard output."""
    with job(commands(folder, ["--json", "--max-tokens", "12"], ["--json", "--max-tokens", "12"])) as found:
        (status, out, err), *others = found.wait()
    assert (status, len(json.loads(out)["outputs"][0]["outputs"][0]["token_ids"])) == (0, 12), err
    assert "tokens/s" in err
    for status, out, err in others:
        assert (status, out) == (0, "")
        assert not [line for line in err.splitlines() if not line.startswith("[Gloo]")]


LONG = ("--max-tokens", "480")


@cases(
    ("count", "number", "rank", "line", "status"),
    [
        (4, signal.SIGKILL, 1, "process 1 was lost", 1),
        (2, signal.SIGKILL, 0, "process 0 was lost", 1),
        (2, signal.SIGTERM, 1, "process 0 was interrupted", 143),  # which was asked to end by process 1
        (2, signal.SIGINT, 0, "process 0 was interrupted", 130),
    ],
    rest=[
        (2, signal.SIGKILL, 0, "process 0 was lost", 1),
        (2, signal.SIGTERM, 1, "process 0 was interrupted", 143),
    ],
)
def test_one_that_ends_ends_all(folder, count, number, rank, line, status):
    with job(commands(folder, *[LONG] * count)) as found:
        found.first_output()
        found.processes[rank].send_signal(number)
        ended = found.wait(LONGEST)
    for other, (code, _, err) in enumerate(ended):
        if other == rank and number == signal.SIGKILL:
            continue
        # Wherever it stands: JAX's service was in process 0, and with it gone JAX tells of that at length, too.
        (said,) = re.findall(r"jaxspec: (.*?)(?:: all processes end)?\n", err)
        interrupted = line, "interrupted", f"process 0 ended with status {status}"  # where nothing was on the device
        allowed = (line,) if number == signal.SIGKILL else interrupted
        assert said in allowed, err
        assert code == status
        assert "Traceback" not in err
        assert "F0000" not in err


@pytest.mark.thorough
def test_a_script_that_fails_ends_all(folder):
    """After the model was made, where no call of the library's is under way."""
    with job(members("fail", 2, str(folder / "target"), "{}")) as found:
        (first, _, err), (other, _, said) = found.wait(LONGEST)
    assert (first, other) == (1, 1)
    assert "RuntimeError: the script's own" in err
    assert "jaxspec: process 0 failed: RuntimeError: the script's own fault: all processes end\n" in said


@pytest.mark.thorough
def test_a_server(folder):
    """Process 0 has it. Told to end, be it by way of another process, it answers what it has, and all end well."""
    own = ["--port", "0", "--no-warm-up", "--max-num-seqs", "2", "--num-pages", "64"]
    words = commands(folder, own, own, words=("serve", str(folder / "target"), "--method", "ngram"))
    for line in words:
        del line[line.index("--model") : line.index("--model") + 2]
    with job(words) as found:
        url = next(line for line in found.processes[0].stderr if line.startswith("serving ")).split()[-1]
        client = openai.OpenAI(base_url=url, api_key="none")
        ask = lambda tokens: client.completions.create(
            model=str(folder / "target"), prompt="Count", max_tokens=tokens, temperature=0, stream=tokens > 100
        )
        first = ask(8).choices[0].text
        assert ask(8).choices[0].text == first
        pieces = iter(ask(200))
        next(pieces)
        found.processes[1].send_signal(signal.SIGTERM)
        assert len(list(pieces)) > 1
        ended = found.wait(LONGEST)
    assert [(status, out) for status, out, _ in ended] == [(0, "")] * 2, ended


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("own", "line"),
    [
        (([], ["-n", "2"]), "process 1 has max_num_seqs=2, process 0 1: start all with the same"),
        (([], ["-k", "2", "--method", "ngram"]), "process 1 has speculative_config."),
    ],
)
def test_other_options_are_refused(folder, own, line):
    with job(commands(folder, *own)) as found:
        ended = found.wait(LONGEST)
    for status, out, err in ended:
        assert (status, out) == (2, "")
        assert line in err


@pytest.mark.thorough
def test_one_whose_weights_are_damaged(folder, tmp_path):
    """It says so, and so do the others."""
    write_model(tmp_path / "target", kv_heads=4)
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with job(commands(Path(), [], []), folders=[folder, tmp_path]) as found:
        for status, out, err in found.wait(LONGEST):
            assert (status, out) == (2, "")
            assert "jaxspec: process 1: " in err
            assert "truncated or damaged" in err


@pytest.mark.thorough
def test_one_that_is_late(folder):
    first, second = commands(folder, [], [])
    with job([second]) as late:
        time.sleep(5)
        with job([first]) as found:
            assert found.wait()[0][0] == 0
        assert late.wait()[0][0] == 0


@pytest.mark.thorough
def test_one_that_does_not_come(folder):
    first, _ = commands(folder, ["--join-timeout", "2"], [])
    with job([first]) as found:
        ((status, out, err),) = found.wait(LONGEST)
    assert (status, out) == (2, "")
    assert "process 1 did not connect to 127.0.0.1:" in err
    assert "within 2 seconds: start all, or raise --join-timeout" in err


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model of 17 MB in each format."""
    root = tmp_path_factory.mktemp("large")
    write_model(root / "hf", layers=1, width=256, vocab_size=8192, kv_heads=4)
    source = checkpoints.resolve(str(root / "hf"))
    config = checkpoints.load_config(source)
    params = checkpoints.load_params(source, config, abstract_params(config, "float32", make_placement()))
    checkpoints.save(root / "orbax", params, config)
    tensors = tensors_of("llama2")
    tables = {name: np.resize(tensors[name], (8192, 48)) for name in ("token_embd.weight", "output.weight")}
    write_gguf(root / "model.gguf", "llama2", tensors=tensors | tables)
    return root


@cases("kind", ["hf", "orbax", "model.gguf"], rest=["hf", "orbax"])
def test_each_reads_its_own_part(large, kind):
    with job(members("read", 2, str(large / kind))) as found:
        ended = found.wait()
    for status, out, err in ended:
        assert status == 0, err
        seen = json.loads(out.splitlines()[-1])
        assert seen["held"] < 0.51 * seen["whole"]
        assert seen["read"] < 0.7 * seen["whole"]  # orbax's own files among them
