"""The command line, in this process where that will do and as a program of its own where exit status and streams
matter."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import typer

import checkpoints
from jaxspec import cli
from jaxspec.accelerators import ACCELERATORS
from jaxspec.cli.app import app
from jaxspec.cli.fields import sentences
from jaxspec.cli.generate import Method, speculation
from jaxspec.cli.shared import DRAFT, EMBEDDED
from jaxspec.config import METHODS
from jaxspec.engine.engine import Engine
from jaxspec.sampling_params import SamplingParams
from jaxspec.train.data_options import DataOptions
from jaxspec.train.options import TrainOptions
from tests.model_folders import EOS, write_model

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "target"))


def refused(capsys, *arguments: str) -> str:
    """The one line that a command which cannot work prints."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    line = err.strip().splitlines()[-1]
    assert line.startswith("jaxspec: ")
    assert "Traceback" not in err
    return line


def run(capsys, *arguments: str) -> tuple[str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 0, err
    return out, err


SHORT = ("--max-tokens", "8", "--temperature", "0")


def test_generate_json(capsys, folder):
    out, err = run(capsys, "generate", "The quick", "brown [fox]", "--model", folder, *SHORT, "--json")
    document = json.loads(out)
    assert document.keys() == {"outputs", "timing"}
    assert document["timing"].keys() >= {"load_seconds", "compile_seconds", "decode_seconds", "tokens_per_second"}
    assert len(document["outputs"]) == 2
    for output in document["outputs"]:
        assert output.keys() >= {"prompt_token_ids", "outputs", "metrics"}
        (completion,) = output["outputs"]
        assert completion.keys() >= {"text", "token_ids", "finish_reason"}
        assert output["metrics"].keys() >= {"num_drafts", "num_draft_tokens", "num_accepted_tokens"}
        assert output["metrics"].keys() >= {"num_accepted_tokens_per_pos", "mean_acceptance_length"}
        assert len(output["metrics"]["num_accepted_tokens_per_pos"]) == 4
    assert "tokens/s" in err


@pytest.mark.thorough
def test_methods_and_streaming_agree(capsys, folder):
    """Greedy text is the same whatever drafts, streamed or not."""
    common = ("generate", "The quick brown fox. The quick brown fox", "--model", folder, *SHORT)
    streamed = run(capsys, *common)[0]
    assert streamed.strip()
    for options in (["--no-stream"], ["--no-stream", "--draft", folder, "-k", "2"]):
        assert run(capsys, *common, *options)[0] == streamed
    plain = json.loads(run(capsys, *common, "--method", "none", "--json")[0])
    assert plain["outputs"][0]["outputs"][0]["text"] == streamed.removesuffix("\n")
    assert plain["outputs"][0]["metrics"]["num_drafts"] == 0


@pytest.mark.parametrize(
    ("options", "method", "draft"),
    [
        ((EMBEDDED, None, None), "ngram+draft_model", DRAFT),
        ((EMBEDDED, Method("draft_model"), None), "draft_model", DRAFT),
        ((EMBEDDED, Method("ngram"), None), "ngram", None),
        ((EMBEDDED, None, "org/mine"), "draft_model", "org/mine"),
        (("org/other", None, None), "ngram", None),
        (("org/other", Method("ngram+draft_model"), "org/mine"), "ngram+draft_model", "org/mine"),
    ],
)
def test_what_speculates(options, method, draft):
    """Prompt lookup, and its trained draft too for the embedded model; what is asked for goes first."""
    found = speculation(*options, None)
    assert (found.method, found.model) == (method, draft)


def test_several_prompts_are_numbered(capsys, folder):
    out, _ = run(capsys, "generate", "one", "two", "--model", folder, *SHORT)
    assert out.startswith("[0] ")
    assert "\n[1] " in out


@pytest.mark.thorough
def test_samples_are_labelled(capsys, folder):
    """By prompt, by sample, or by both; never streamed."""
    common = ("--model", folder, "--max-tokens", "6", "--seed", "3")
    one, _ = run(capsys, "generate", "one", *common, "-n", "2")
    both, _ = run(capsys, "generate", "one", "two", *common, "-n", "2")
    assert re.findall(r"^\[[\d.]+\] ", one, re.MULTILINE) == ["[0] ", "[1] "]
    assert re.findall(r"^\[[\d.]+\] ", both, re.MULTILINE) == ["[0.0] ", "[0.1] ", "[1.0] ", "[1.1] "]
    document = json.loads(run(capsys, "generate", "one", *common, "-n", "2", "--json")[0])
    first, second = document["outputs"][0]["outputs"]
    assert (first["index"], second["index"]) == (0, 1)
    assert one == f"[0] {first['text']}\n[1] {second['text']}\n"


@pytest.mark.thorough
def test_stop_and_min_tokens(capsys, folder):
    common = ("generate", "The quick", "--model", folder, "--max-tokens", "12", "--temperature", "0", "--json")
    whole = json.loads(run(capsys, *common)[0])["outputs"][0]["outputs"][0]
    stop = whole["text"][2:4]
    cut = json.loads(run(capsys, *common, "--stop", "never there", "--stop", stop)[0])["outputs"][0]["outputs"][0]
    assert (cut["text"], cut["stop_reason"]) == (whole["text"].split(stop)[0], stop)
    late = json.loads(run(capsys, *common, "--stop", stop, "--min-tokens", "11")[0])["outputs"][0]["outputs"][0]
    assert len(late["token_ids"]) > 10


def test_logprobs_in_the_document(capsys, folder):
    output = json.loads(run(capsys, "generate", "hello", "--model", folder, *SHORT, "--logprobs", "2", "--json")[0])
    (completion,) = output["outputs"][0]["outputs"]
    assert len(completion["logprobs"]) == len(completion["token_ids"])
    for i, entry in zip(completion["token_ids"], completion["logprobs"], strict=True):
        assert len(entry) == 2, "greedy: the chosen one is the likeliest"
        assert (entry[str(i)]["rank"], set(entry[str(i)])) == (1, {"logprob", "rank", "decoded_token"})
    chosen = [e[str(i)]["logprob"] for i, e in zip(completion["token_ids"], completion["logprobs"], strict=True)]
    assert completion["cumulative_logprob"] == pytest.approx(sum(chosen))


def test_every_option_reaches_the_params(capsys, folder, monkeypatch):
    given = {
        "n": 2,
        "max_tokens": 7,
        "min_tokens": 3,
        "temperature": 0.5,
        "seed": 9,
        "top_p": 0.9,
        "top_k": 11,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "logprobs": 4,
    }
    seen = []
    monkeypatch.setattr("jaxspec.llm.LLM.generate", lambda self, prompts, params: seen.append(params) or [])
    options = [word for name, value in given.items() for word in (cli_name(name), str(value))]
    run(capsys, "generate", "x", "--model", folder, *options, "--stop", "a", "--stop", "b", "--json")
    assert seen == [SamplingParams(**given, stop=("a", "b"))]


def cli_name(field: str) -> str:
    return "-n" if field == "n" else "--" + field.replace("_", "-")


@pytest.mark.parametrize("options", [[], ["--no-stream"], ["--json"]])
def test_a_completion_that_fails_is_said_with_status_2(capsys, folder, monkeypatch, options):
    step = Engine.step

    def failing(self, streaming):
        ran = step(self, streaming=streaming)
        for request in ran:
            request.finish_reason, request.error = "error", "the launch failed: out of memory"
            self.scheduler.remove(request) if request in self.scheduler.running else None
        return ran

    monkeypatch.setattr(Engine, "step", failing)
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", "x", "--model", folder, "--max-tokens", "50", *options])
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert err.splitlines()[-1].startswith("jaxspec: ")
    assert err.splitlines()[-1].endswith("the launch failed: out of memory")
    assert "Warning" not in err
    if "--json" in options:
        assert json.loads(out)["outputs"][0]["outputs"][0]["error"]


def test_chat_and_seed(capsys, folder):
    common = ("generate", "hello", "--model", folder, "--max-tokens", "8", "--chat", "--json")
    sampled = [json.loads(run(capsys, *common, "--seed", s)[0])["outputs"][0] for s in ("1", "1", "2")]
    assert sampled[0]["prompt"] == "<s><user>hello<bot>"
    first, again, other = (s["outputs"][0]["token_ids"] for s in sampled)
    assert first == again != other
    assert json.loads(run(capsys, *common, "--seed", "1", "--top-k", "1")[0])["outputs"]


def test_info(capsys, folder):
    document = json.loads(run(capsys, "info", folder, "--draft", folder, "--json")[0])
    model = document["model"]
    assert (model["architecture"], model["dtype"], model["format"]) == ("llama", "float32", "hf")
    assert model["parameters"] == 2 * 320 * 32 + 2 * (32 * 64 + 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
    assert model["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, bytes
    assert (model["context_length"], model["tokenizer_size"], model["stop_ids"]) == (512, 320, [EOS])
    assert document["draft_fits"] is True
    assert document["device"] == jax.devices()[0].device_kind
    assert document["tokens_that_fit"] == document["pages"] * document["page_size"]
    out, _ = run(capsys, "info", folder)
    for word in ("llama", "float32", "512 tokens", "256 bytes per token", "2 </s>", "pages that fit"):
        assert word in out


def test_info_of_a_device_that_is_not_here(capsys, folder):
    """Weights and temporary memory leave the rest of what the engine uses to pages of both models."""
    say = lambda device: json.loads(run(capsys, "info", folder, "--draft", folder, "--device", device, "--json")[0])
    documents = {name: say(name) for name in ACCELERATORS}
    for name, document in documents.items():
        facts, plain = ACCELERATORS[name], name == "T4"
        models = document["model"], document["draft"]
        assert {model["dtype"] for model in models} == {"float32" if plain else "bfloat16"}
        assert ("plain forms" if plain else "kernels in") in document["device"]
        share = 0.75 if facts.platform == "gpu" else 1
        assert document["memory_bytes"] == pytest.approx(0.9 * share * facts.memory)
        free = document["memory_bytes"] - document["temporary_bytes"] - sum(model["weight_bytes"] for model in models)
        # GPU: heads of 8 padded to 16; TPU: to 128.
        padded = {"gpu": 2, "tpu": 16}[facts.platform]
        page = document["page_size"] * 2 * (2 * 2 * 2 * 8) * padded * (4 if plain else 2)
        assert document["pages"] == free // page
    assert say("tpu V5E") == documents["v5e"]
    assert "kernels in bfloat16" in run(capsys, "info", folder, "--device", "L4")[0].replace("\n", " ")
    wrong = refused(capsys, "info", folder, "--device", "H800")
    assert wrong == f"jaxspec: --device 'H800' is unknown: use one of {', '.join(ACCELERATORS)}"


def test_info_of_a_draft_that_does_not_fit(capsys, folder, tmp_path):
    draft = write_model(tmp_path / "foreign", text="entirely different words " * 5)
    document = json.loads(run(capsys, "info", folder, "--draft", str(draft), "--json")[0])
    assert document["draft_fits"] is False
    assert "'foreign' has another tokenizer than the target 'target'" in document["draft_problem"]
    assert "another tokenizer" in run(capsys, "info", folder, "--draft", str(draft))[0]


def test_convert(capsys, folder, tmp_path):
    """The converted folder says the same."""
    out, _ = run(capsys, "convert", folder, str(tmp_path / "orbax"))
    assert out.strip() == str(tmp_path / "orbax")
    common = ("generate", "The quick", *SHORT, "--no-stream", "--model")
    assert run(capsys, *common, out.strip())[0] == run(capsys, *common, folder)[0]
    assert "exists and is not empty" in refused(capsys, "convert", folder, str(tmp_path / "orbax"))
    assert "--dtype='int3' is unknown" in refused(capsys, "convert", folder, str(tmp_path / "o"), "--dtype", "int3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "max_tokens=0 is below 1"),
        (["--temperature", "-1"], "temperature=-1.0 must lie in [0, 1e6]; 0 is greedy"),
        (["--top-p", "2"], "top_p=2.0 must lie in (0, 1]"),
        (["-n", "0"], "n=0 is below 1"),
        (["--stop", ""], "stop=[''] must hold non-empty strings"),
        (["--min-tokens", "200"], "min_tokens=200 is above max_tokens, 128"),
        (["--logprobs", "21", "--json"], "logprobs=21 is above 20"),
        (["--logprobs", "1"], "--logprobs 1 is shown in the JSON document only: add --json"),
        (["--repetition-penalty", "0"], "repetition_penalty=0.0 must lie in [0.001, 1000]; 1 turns it off"),
        (["--presence-penalty", "3"], "presence_penalty=3.0 must lie in [-2, 2]; 0 turns it off"),
        (["--frequency-penalty", "-3"], "frequency_penalty=-3.0 must lie in [-2, 2]"),
        (["-k", "0"], "num_speculative_tokens=0 is below 1"),
        (["--method", "none", "-k", "3"], "--method none decodes plainly: leave --draft and -k out"),
        (["--model", "org/x", "--method", "draft_model"], "method='draft_model' needs model="),
        (["--method", "ngram", "--draft", "x"], "method='ngram' uses no draft model"),
        (["--model", "./[bold]no such[/bold].gguf"], "./[bold]no such[/bold].gguf does not exist"),
        (["--model", "unheard-of"], "no model 'unheard-of': give a folder, a .gguf file, a hub id"),
        (["--model", "no-such/model-anywhere"], "cannot fetch no-such/model-anywhere from the hub"),
    ],
)
def test_errors_are_one_line(capsys, arguments, message):
    assert message in refused(capsys, "generate", "hello", *arguments)


def test_bad_prompts_are_one_line(capsys, folder):
    line = refused(capsys, "generate", "short", "long " * 600, "--model", folder)
    assert "prompt 1: the prompt has" in line
    assert "max_model_len=512 leaves no room" in line


def test_the_traceback_can_be_kept(monkeypatch):
    monkeypatch.setenv("JAXSPEC_DEBUG", "1")
    with pytest.raises(ValueError, match="max_tokens=0"):
        cli.main(["generate", "hello", "--max-tokens", "0"])


def test_the_program_itself(folder):
    """Exit status and streams as a shell sees them."""
    program = [sys.executable, "-m", "jaxspec.cli"]
    ran = subprocess.run([*program, "info", folder, "--json"], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["model"]["architecture"] == "llama"
    failed = subprocess.run([*program, "generate", "x", "--top-k", "-5"], capture_output=True, text=True, cwd=ROOT)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "jaxspec: top_k=-5 is below -1; 0 turns it off\n"


def test_an_unknown_option_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", "x", "--max-token", "3"])
    assert stop.value.code == 2
    assert "--max-tokens" in capsys.readouterr().err


def test_commands_are_listed(capsys):
    out, _ = run(capsys, "--help")
    names = ("demo", "generate", "bench", "generate-data", "train-draft", "evaluate-draft", "convert", "info")
    assert all(f" {name} " in out for name in names)


def test_defaults_agree():
    """The command line does not import what it would take these from."""
    from jaxspec.cli.demo import demo as command
    from jaxspec.demo import run as demo

    assert EMBEDDED == demo.MODEL == checkpoints.sources.DEFAULT_MODEL
    assert command.__defaults__[0] == demo.MAX_TOKENS


def test_every_option_has_a_help():
    for name, command in typer.main.get_command(app).commands.items():
        assert not [p.name for p in command.params if p.name != "prompts" and not p.help], name


def test_options_are_those_of_the_classes():
    """Their defaults too, but for what a command says is its own."""
    commands = typer.main.get_command(app).commands
    for name, cls in {"train-draft": TrainOptions, "generate": SamplingParams, "generate-data": DataOptions}.items():
        fields = {field.name: field.default for field in dataclasses.fields(cls)}
        others = {"target", "loss", "max_tokens", "stop", "part", "mixture", "temperatures", "num_speculative_tokens"}
        shown = {p.name: p.default for p in commands[name].params if p.name in fields.keys() - others}
        assert len(shown) >= 5
        assert shown == {field: None if fields[field] is dataclasses.MISSING else fields[field] for field in shown}
    assert {*Method} == {*METHODS, "none"}


def test_help_is_the_first_sentence_of_the_docstring():
    class Options:
        """What.

        Args:
          one: The first: a.b or c. And more
            of it.
          two, three: Both.

        Raises: nothing.
        """

    assert sentences(Options) == {"one": "The first: a.b or c.", "two": "Both.", "three": "Both."}
