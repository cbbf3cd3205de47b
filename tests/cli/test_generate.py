"""jaxspec generate: what it prints, and what its options do."""

from __future__ import annotations

import json
import re

import pytest

from jaxspec import cli
from jaxspec.cli.speculation import Method, speculation
from jaxspec.common.embedded import DRAFT, MODEL
from jaxspec.engine.engine import Engine
from jaxspec.options.sampling_params import SamplingParams
from tests.support.commands import SHORT, run
from tests.support.model_folders import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "target"))


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
        ((MODEL, None, None), "ngram+eagle3", DRAFT),
        ((MODEL, Method("eagle3"), None), "eagle3", DRAFT),
        ((MODEL, Method("ngram"), None), "ngram", None),
        ((MODEL, None, "org/mine"), None, "org/mine"),
        (("org/other", None, None), "ngram", None),
        (("org/other", Method("ngram+draft_model"), "org/mine"), "ngram+draft_model", "org/mine"),
    ],
)
def test_what_speculates(options, method, draft):
    """Prompt lookup, and its head too for the embedded model; what is asked for goes first, and
    how a given draft is used its files say."""
    found = speculation(*options, {})
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
        assert (entry[str(i)]["rank"], set(entry[str(i)])) == (1, {"logprob", "rank", "decoded_token", "token_bytes"})
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
    monkeypatch.setattr("jaxspec.api.llm.LLM.generate", lambda self, prompts, params: seen.append(params) or [])
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
