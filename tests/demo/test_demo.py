"""The demo with its real weights, shortened, and a draft that knows nothing."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import checkpoints
from checkpoints import sources
from jaxspec import cli
from jaxspec.api.outputs import CompletionOutput, RequestOutput
from jaxspec.common.embedded import DRAFT, MODEL
from jaxspec.demo import beside_transformers, report
from jaxspec.demo import run as demo
from jaxspec.demo.demo_options import DemoOptions
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.models.decoder import random_params
from jaxspec.parallel.placement import make_placement

pytestmark = pytest.mark.real


def write_draft(folder):
    """One random layer, 64 wide, for the demo's target."""
    source = checkpoints.resolve(MODEL)
    config = checkpoints.load_config(source)
    small = {"num_layers": 1, "windows": (None,), "width": 64, "num_heads": 1, "num_kv_heads": 1, "mlp_width": 64}
    config = dataclasses.replace(config, **small)
    fingerprint = checkpoints.fingerprint(checkpoints.load_tokenizer(source))
    checkpoints.save(folder, random_params(config, jnp.bfloat16, make_placement()), config, fingerprint=fingerprint)
    return str(folder)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(document, picture) of one run."""
    folder = tmp_path_factory.mktemp("demo")
    picture = folder / "demo.png"
    printed: dict[str, dict] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "DRAFT_CHOICES", (2, 4))  # one engine: each has to be compiled
        patch.setattr(report, "show", lambda document: printed.update(document=document))
        demo.demo(DemoOptions(max_tokens=6, draft=write_draft(folder / "draft")), plot=picture)
    return printed["document"], picture


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_document(measured):
    document, _ = measured
    assert document.keys() >= {"model", "draft", "device", "prompts", "methods"}
    assert document["model"] == "smollm2-135m-instruct"
    assert len(document["prompts"]) == len(document["answers"]) >= 3
    assert list(document["methods"]) == ["plain", "ngram", "draft_model", "ngram+draft_model"]
    assert document["transformers"] is None
    for method in document["methods"].values():
        assert method["tokens"] == 6 * len(document["prompts"])
        assert method["tokens_per_second"] == pytest.approx(method["tokens"] / method["seconds"])
        assert method["compile_seconds"] > 0
        assert len(method["tokens_per_second_per_prompt"]) == len(document["prompts"])
    ngram = document["methods"]["ngram"]
    assert ngram["mean_acceptance_length"] > 2.0  # it copies a text and edits one
    assert len(ngram["num_accepted_tokens_per_pos"]) == ngram["num_speculative_tokens"] == 4
    assert json.loads(json.dumps(document)) == document


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_the_fastest_number_of_drafts_is_shown(measured):
    document, _ = measured
    trials, draft = document["draft_trials"], document["methods"]["draft_model"]
    assert [int(k) for k in trials] == [2, 4]
    assert trials[str(draft["num_speculative_tokens"])] == max(trials.values())
    assert len(draft["num_accepted_tokens_per_pos"]) == draft["num_speculative_tokens"]
    assert draft["mean_acceptance_length"] < 1.5  # it knows nothing
    assert document["draft"].endswith("draft")


def test_a_head_is_called_by_its_name(tmp_path, capsys):
    """In tables and in the picture, where a draft model is called the draft."""
    speeds = {"tokens_per_second": 9.0, "tokens_per_second_per_prompt": [9.0], "compile_seconds": 1.0}
    drafted = speeds | {"num_drafts": 2, "num_speculative_tokens": 1, "num_accepted_tokens_per_pos": [1]}
    drafted |= {"mean_acceptance_length": 1.5, "mean_acceptance_length_per_prompt": [1.5], "identical_to_plain": True}
    methods = {"plain": speeds} | dict.fromkeys(["ngram", "eagle3", "ngram+eagle3"], drafted | {"differences": []})
    known = {"model": "a model", "device": "a device", "dtype": "float32", "load_seconds": 1.0, "transformers": None}
    document = known | {"methods": methods, "titles": ["one"], "answers": ["yes"], "prompts": ["?"]}
    report.show(document | {"quantization": "int8"})
    assert "a model on a device, float32, weights in int8, greedy" in capsys.readouterr().out
    report.show(document)
    lines = capsys.readouterr().out.splitlines()
    for name in ("plain", "n-gram", "eagle3", "both"):
        assert any(line.split()[:1] == [name] for line in lines), name
    report.draw(document, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_an_answer_that_fails_is_no_answer():
    class Failing:
        timing = SimpleNamespace(compile_seconds=0.0)

        def generate(self, *_, **__):
            return [SimpleNamespace(outputs=[SimpleNamespace(error="KeyError: 'parts'")])]

    with pytest.raises(RuntimeError, match="an answer failed: KeyError: 'parts'"):
        demo.answer(demo.Way(Failing(), 4), "?", 8)


def test_two_engines_serve_all_numbers_of_drafts():
    class Fake:
        def speculating(self, options):
            return dict(options)

    ways = demo.draft_ways(Fake(), {"model": "the draft", "quantization": "int8"})
    assert {(way.llm["model"], way.llm["quantization"]) for way in ways.values()} == {("the draft", "int8")}
    assert {k: (way.llm["num_speculative_tokens"], way.num_speculative_tokens) for k, way in ways.items()} == {
        2: (4, 2),
        3: (3, 3),
        4: (4, 4),
    }
    assert ways[2].llm is ways[4].llm


@pytest.mark.thorough
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ngram", "draft_model", "ngram+draft_model"])
def test_speculation_changes_nothing(measured, name):
    document, _ = measured
    method = document["methods"][name]
    assert method["num_drafts"] > 0
    assert method["identical_to_plain"], method["differences"]


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_the_model_makes_sense(measured):
    document, _ = measured
    assert document["answers"][0].startswith("The Amazon river is")
    assert "capital of France is" in document["answers"][-1]


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_picture(measured):
    from matplotlib.image import imread

    _, picture = measured
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    pixels = imread(picture)
    assert min(pixels.shape[:2]) > 400
    assert pixels[..., :3].std() > 0.05  # not an empty sheet


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_tables(measured, capsys):
    document, _ = measured
    theirs = {"tokens": 24, "seconds": 2.0, "tokens_per_second": 12.0, "same_answers": 3}
    report.show(document | {"transformers": {"float32": theirs}})
    out = capsys.readouterr().out
    rates = " ".join(f"{100 * rate:.0f}" for rate in report.acceptance_rates(document["methods"]["ngram"]))
    words = ("tokens/s", "speed-up", "accept.", rates, "plain", "n-gram", "draft", "yes", "transformers f32", "3/4")
    for word in (*words, *document["titles"]):
        assert word in out, word
    assert max(map(len, out.splitlines())) <= 80


def test_the_trained_draft_is_the_default(monkeypatch):
    asked = []
    monkeypatch.setattr(demo, "demo", lambda options, **_: asked.append(options.draft))
    for arguments in (["--draft", "x"], []):
        with pytest.raises(SystemExit):
            cli.main(["demo", *arguments])
    assert asked == ["x", *sources.DRAFTS.values()]
    assert sources.DRAFTS == {MODEL: DRAFT}


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_json_is_all_there_is_on_standard_output(measured, monkeypatch, capsys):
    document, _ = measured
    monkeypatch.setattr(demo, "measure", lambda options: demo.write_line("loading") or document)
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--json", "--max-tokens", "6"])
    assert stop.value.code == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == document
    assert err == "loading\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens 0 is below 1"),
        (["--max-tokens", "100000"], "--max-tokens 100000 is above 1792: the demo holds 2048 tokens, 256 of them for"),
        (["--plot", "/no/such/folder/x.png"], "the folder /no/such/folder does not exist: make it first"),
        (["--plot", "x.jpg"], "give a name that ends in .png"),
        (["--plot", "x.png"], "--plot x.png: pictures need matplotlib: pip install 'jaxspec-decoding[plots]'"),
        (["--dtype", "int4"], "--dtype 'int4' is unknown"),
        (["--compare-transformers"], "needs torch: pip install torch"),
    ],
)
def test_bad_input_is_told_before_anything_is_loaded(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(demo, "measure", lambda options: pytest.fail("loaded"))
    monkeypatch.setattr(beside_transformers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_differences_are_located():
    def run(*ids: int) -> demo.Run:
        completion = CompletionOutput(0, "", list(ids))
        metrics = SpecDecodeMetrics(num_drafts=1, num_accepted_tokens_per_pos=[1, 1, 0, 0])
        return demo.Run(RequestOutput(0, None, [], [completion], metrics), 1.0)

    plain = [run(1, 2, 3), run(4, 5), run(6, 7)]
    taken = [run(1, 2, 3), run(4, 9), run(6, 7, 8)]
    assert list(demo.first_differences(taken, plain)) == [
        {"prompt": 1, "position": 1},
        {"prompt": 2, "position": 2},
    ]
    assert demo.speculation(taken, plain, 4)["identical_to_plain"] is False
    same = demo.speculation(plain, plain, 2)
    assert same["identical_to_plain"] is True
    assert (same["num_speculative_tokens"], same["num_accepted_tokens_per_pos"]) == (2, [3, 3])


@pytest.mark.oracle
def test_transformers_answers_from_the_same_weights(tmp_path):
    """A tiny model: float32 gives the same ids, and so do the tensors' names and shapes."""
    pytest.importorskip("torch")
    from jaxspec.api.llm import LLM
    from tests.support.model_folders import write_model

    llm = LLM(str(write_model(tmp_path / "tiny", layers=3)))
    prompts = [llm.render_chat([{"role": "user", "content": text}]) for text in ("The quick brown", "One, two,")]
    greedy = demo.sampling(8, 0)
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, progress=False)]
    found = beside_transformers.compare(llm, prompts, 8, plain)
    assert set(found) == {"float32", "bfloat16"}
    assert found["float32"]["same_answers"] == 2
    for figures in found.values():
        assert figures["tokens"] == sum(map(len, plain))
        assert figures["tokens_per_second"] == pytest.approx(figures["tokens"] / figures["seconds"])
    wrong = beside_transformers.compare(llm, prompts, 8, [[], []])
    assert wrong["float32"]["same_answers"] == 0
