"""The demo with its real weights, shortened."""

from __future__ import annotations

import json

import pytest

from jaxspec import cli, demo
from jaxspec.outputs import CompletionOutput, RequestOutput, SpecDecodeMetrics

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(standard output, standard error, picture) of one run."""
    capture = pytest.MonkeyPatch()
    picture = tmp_path_factory.mktemp("demo") / "demo.png"
    printed: dict[str, str] = {}
    capture.setattr(demo, "show", lambda document: printed.update(document=document))
    try:
        demo.demo(6, plot=picture)
    finally:
        capture.undo()
    return printed["document"], picture


def test_document(measured):
    document, _ = measured
    assert document.keys() >= {"model", "draft", "device", "prompts", "methods"}
    assert document["model"] == "smollm2-135m-instruct"
    assert len(document["prompts"]) == len(document["answers"]) >= 3
    assert set(document["methods"]) == {"plain", "ngram"}  # methods that cannot run are absent
    for method in document["methods"].values():
        assert method["tokens"] == 6 * len(document["prompts"])
        assert method["tokens_per_second"] == pytest.approx(method["tokens"] / method["seconds"])
        assert method["compile_seconds"] > 0
        assert len(method["tokens_per_second_per_prompt"]) == len(document["prompts"])
    ngram = document["methods"]["ngram"]
    assert ngram["mean_acceptance_length"] > 2.0  # it copies a text and edits one
    assert len(ngram["num_accepted_tokens_per_pos"]) == 4
    assert json.loads(json.dumps(document)) == document


def test_speculation_changes_nothing(measured):
    document, _ = measured
    ngram = document["methods"]["ngram"]
    assert ngram["identical_to_plain"], ngram["differences"]


def test_the_model_makes_sense(measured):
    document, _ = measured
    assert document["answers"][0].startswith("The Amazon river is")
    assert "capital of France is" in document["answers"][-1]


def test_picture(measured):
    from matplotlib.image import imread

    _, picture = measured
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    pixels = imread(picture)
    assert min(pixels.shape[:2]) > 400
    assert pixels[..., :3].std() > 0.05  # not an empty sheet


def test_tables(measured, capsys):
    document, _ = measured
    demo.show(document)
    out = capsys.readouterr().out
    for word in ("tokens/s", "speed-up", "accept. length", "plain", "ngram", "yes", *document["titles"]):
        assert word in out, word
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_all_there_is_on_standard_output(measured, monkeypatch, capsys):
    document, _ = measured
    monkeypatch.setattr(demo, "measure", lambda params: demo.say("loading") or document)
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--json", "--max-tokens", "6"])
    assert stop.value.code == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == document
    assert err == "loading\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "max_tokens=0 is below 1"),
        (["--plot", "/no/such/folder/x.png"], "the folder /no/such/folder does not exist: make it first"),
        (["--plot", "x.jpg"], "give a name that ends in .png"),
    ],
)
def test_bad_input_is_told_before_anything_is_loaded(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(demo, "measure", lambda params: pytest.fail("loaded"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_differences_are_located():
    def run(*ids: int) -> demo.Run:
        completion = CompletionOutput(0, "", list(ids))
        return demo.Run(RequestOutput(0, None, [], [completion], SpecDecodeMetrics(num_drafts=1)), 1.0)

    plain = [run(1, 2, 3), run(4, 5), run(6, 7)]
    taken = [run(1, 2, 3), run(4, 9), run(6, 7, 8)]
    assert list(demo.first_differences(taken, plain)) == [
        {"prompt": 1, "position": 1},
        {"prompt": 2, "position": 2},
    ]
    assert demo.speculation(taken, plain)["identical_to_plain"] is False
    assert demo.speculation(plain, plain)["identical_to_plain"] is True
