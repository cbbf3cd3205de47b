"""The command line, in this process where that will do and as a program of its own where exit status and streams
matter."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jax
import pytest
import typer

import jaxspec
from jaxspec import cli
from jaxspec.cli.app import app
from jaxspec.cli.fields import in_flag_terms, sentences
from jaxspec.cli.speculation import Method
from jaxspec.common.errors import UserError
from jaxspec.common.values import option, options
from jaxspec.demo.demo_options import DemoOptions as DemoOptions
from jaxspec.drafters.methods import NAMES
from jaxspec.hardware.accelerators import ACCELERATORS
from jaxspec.options.engine import EngineConfig
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.runtime.compilation_cache import enable_compilation_cache
from jaxspec.train.data_options import DataOptions
from jaxspec.train.train_options import TrainOptions
from tests.support.commands import SHORT, answers_no, refused, run
from tests.support.model_folders import EOS, write_model
from tests.support.root import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "target"))


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
        found = facts.available or facts.memory * (0.75 if facts.platform == "gpu" else 1)
        assert document["memory_bytes"] == pytest.approx(0.9 * found)
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
    for more in (["--json"], []):
        out, line = answers_no(capsys, "info", folder, "--draft", str(draft), *more)
        assert line.startswith("jaxspec: the draft 'foreign' has another tokenizer than the target 'target'")
        assert "another tokenizer" in out
        if more:
            document = json.loads(out)
            assert (document["draft_fits"], f"jaxspec: {document['draft_problem']}") == (False, line)


def test_convert(capsys, folder, tmp_path):
    """The converted folder says the same."""
    out, _ = run(capsys, "convert", folder, str(tmp_path / "orbax"))
    assert out.strip() == str(tmp_path / "orbax")
    common = ("generate", "The quick", *SHORT, "--no-stream", "--model")
    assert run(capsys, *common, out.strip())[0] == run(capsys, *common, folder)[0]
    assert "exists and is not empty" in refused(capsys, "convert", folder, str(tmp_path / "orbax"))
    assert "--dtype 'int3' is unknown" in refused(capsys, "convert", folder, str(tmp_path / "o"), "--dtype", "int3")
    assert "--weight-bits 4: give 8" in refused(capsys, "convert", folder, str(tmp_path / "o"), "--weight-bits", "4")
    refusal = refused(capsys, "convert", folder, str(tmp_path / "o"), "--quantization", "int3")
    assert "--quantization 'int3' is unknown: use one of int8" in refusal
    out, _ = run(capsys, "convert", folder, str(tmp_path / "eight"), "--weight-bits", "8")
    assert out.strip() == str(tmp_path / "eight")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens 0 is below 1"),
        (["--temperature", "-1"], "--temperature -1.0 must lie in [0, 1e6]; 0 is greedy"),
        (["--top-p", "2"], "--top-p 2.0 must lie in (0, 1]"),
        (["-n", "0"], "-n 0 is below 1"),
        (["--stop", ""], "--stop [''] must hold non-empty strings"),
        (["--min-tokens", "200"], "--min-tokens 200 is above --max-tokens, 128"),
        (["--logprobs", "21", "--json"], "--logprobs 21 is above 20"),
        (["--logprobs", "1"], "--logprobs 1 is shown in the JSON document only: add --json"),
        (["--repetition-penalty", "0"], "--repetition-penalty 0.0 must lie in [0.001, 1000]; 1 turns it off"),
        (["--presence-penalty", "3"], "--presence-penalty 3.0 must lie in [-2, 2]; 0 turns it off"),
        (["--frequency-penalty", "-3"], "--frequency-penalty -3.0 must lie in [-2, 2]"),
        (["-k", "0"], "--num-speculative-tokens 0 drafts nothing: use --method none"),
        (["--method", "none", "-k", "3"], "--method none turns speculation off: leave --num-speculative-tokens out"),
        (["--model", "org/x", "--method", "draft_model"], "'draft_model' needs --draft: the draft's hub id, folder"),
        (["--method", "ngram", "--draft", "x"], "--method 'ngram' uses no draft model, but --draft 'x' is given"),
        (["--max-model-len", "0"], "--max-model-len 0 is below 1"),
        (["--dtype", "float8"], "--dtype 'float8' is unknown: use one of auto, float32"),
        (["--speculative-config", "[]"], "Invalid value for '--speculative-config': '[]': it must be an object"),
        (["--speculative-config", '{"tree_depth": 0}'], ": tree_depth=0 is below 1"),
        (["--speculative-config", "{}", "--method", "none"], "holds all options of speculation: leave --method out"),
        (["--model", "./[bold]no such[/bold].gguf"], "./[bold]no such[/bold].gguf does not exist"),
        (["--model", "smolm2-135m-instruct"], "no model 'smolm2-135m-instruct': did you mean 'smollm2-135m-instruct'?"),
        (["--model", "unheard-of"], "no model 'unheard-of': give a folder, a .gguf file, a hub id"),
        (["--model", "no-such/model-anywhere"], "cannot fetch no-such/model-anywhere from the hub"),
    ],
)
def test_errors_are_one_line(capsys, arguments, message):
    assert message in refused(capsys, "generate", "hello", *arguments)


FLAGS = {
    "max_model_len": ("--max-model-len",),
    "n": ("-n",),
    "stop": ("--stop",),
    "warm": ("--warm", "--no-warm"),
}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("max_model_len=9 is short: raise max_model_len.", "--max-model-len 9 is short: raise --max-model-len."),
        ("n=0 is below 1; stop at n of them", "-n 0 is below 1; stop at n of them"),
        ("stop=['n=1'] and warm=False or warm=True", "--stop ['n=1'] and --no-warm or --warm"),
        ("give max_model_len=: a number", "give --max-model-len: a number"),
        ("did you mean 'max_model_len'? /n/max_model_len.json", "did you mean 'max_model_len'? /n/max_model_len.json"),
    ],
)
def test_refusals_name_options_as_they_are_typed(said, shown):
    """And in Python as Python has them."""
    with pytest.raises(UserError) as refusal, in_flag_terms(FLAGS):
        raise UserError(said)
    assert str(refusal.value) == shown


def test_commands_that_generate_have_all_options_of_an_engine():
    commands = typer.main.get_command(app).commands
    engine = {field.name for field in dataclasses.fields(EngineConfig)} - {"enable_lora", "pipeline_parallel_size"}
    for name in ("generate", "serve", "evaluate-draft"):
        options = {p.name: p for p in commands[name].params}
        assert options.keys() >= engine, name
        assert "-k" in options["num_speculative_tokens"].opts


def test_the_version(capsys):
    assert run(capsys, "--version")[0] == f"jaxspec {jaxspec.__version__}\n"


def test_a_cache_that_cannot_be_written_is_said_once(tmp_path, monkeypatch, caplog):
    """And nothing is kept, nor looked for: JAX would warn of every program."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "file"))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert [enable_compilation_cache() for _ in range(2)] == [None, None]
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    (line,) = caplog.messages
    assert line.startswith(
        f"{tmp_path}/file/xla cannot be used (File exists): nothing is read from it or written there"
    )
    assert line.endswith("set JAXSPEC_CACHE to a folder of your own")


def test_bad_prompts_are_one_line(capsys, folder):
    line = refused(capsys, "generate", "short", "long " * 600, "--model", folder)
    assert "prompt 1: the prompt has" in line
    assert "maximum context length is 512 tokens" in line


def test_the_traceback_can_be_kept(monkeypatch):
    monkeypatch.setenv("JAXSPEC_DEBUG", "1")
    with pytest.raises(ValueError, match="--max-tokens 0"):
        cli.main(["generate", "hello", "--max-tokens", "0"])


@pytest.mark.thorough  # tests/cli/test_exits.py runs others
def test_the_program_itself(folder):
    """Exit status and streams as a shell sees them."""
    program = [sys.executable, "-m", "jaxspec.cli"]
    ran = subprocess.run([*program, "info", folder, "--json"], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["model"]["architecture"] == "llama"
    failed = subprocess.run([*program, "generate", "x", "--top-k", "-5"], capture_output=True, text=True, cwd=ROOT)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "jaxspec: --top-k -5 is below -1; 0 turns it off\n"


def test_an_unknown_option_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", "x", "--max-token", "3"])
    assert stop.value.code == 2
    assert "--max-tokens" in capsys.readouterr().err


def test_commands_are_listed(capsys):
    out, _ = run(capsys, "--help")
    names = (
        "demo",
        "generate",
        "serve",
        "bench",
        "bench-serve",
        "generate-data",
        "train-draft",
        "evaluate-draft",
        "convert",
        "info",
    )
    assert all(f" {name} " in out for name in names)


def test_every_option_has_a_help():
    for name, command in typer.main.get_command(app).commands.items():
        assert not [p.name for p in command.params if p.name != "prompts" and not p.help], name


def test_options_are_those_of_the_classes():
    """Their defaults too, but for what a command says is its own."""
    commands = typer.main.get_command(app).commands
    classes = {
        "demo": DemoOptions,
        "train-draft": TrainOptions,
        "generate": SamplingParams,
        "generate-data": DataOptions,
    }
    for name, cls in classes.items():
        fields = {field.name: field.default for field in dataclasses.fields(cls)}
        others = {"target", "loss", "max_tokens", "stop", "part", "mixture", "temperatures", "num_speculative_tokens"}
        shown = {p.name: p.default for p in commands[name].params if p.name in fields.keys() - others}
        assert len(shown) >= (3 if name == "demo" else 5)
        assert shown == {field: None if fields[field] is dataclasses.MISSING else fields[field] for field in shown}
    assert {*Method} == {*NAMES, "none"}


def test_help_is_the_first_sentence_of_an_option():
    @options
    class DemoOptions:
        """Options of a test.

        Raises: nothing.
        """

        one: int = option("The first: a.b or c. And more of it.", default=1)
        two: int = option("The second.")

    assert sentences(DemoOptions) == {"one": "The first: a.b or c.", "two": "The second."}
    listed = "Args:\n  one: The first: a.b or c. And more of it.\n  two: The second."
    assert DemoOptions.__doc__ == f"Options of a test.\n\n{listed}\n\nRaises: nothing."
