"""Acceptance of a draft: by category, position and temperature."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxspec import cli
from jaxspec.common.errors import UserError
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.train import evaluate
from tests.support.model_folders import write_model

PROMPTS = {"chat": ["The quick brown fox?", "One, two"], "code": ["def total(items):"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "draft", seed=1, layers=1))


@pytest.fixture(scope="module")
def itself(folder):
    """The target as its own draft."""
    return evaluate.evaluate(folder, folder, PROMPTS, num_speculative_tokens=3, max_tokens=12, progress=False)


def rows(document):
    return {(r["temperature"], r["category"]): r for r in document["rows"]}


def test_a_perfect_draft(itself):
    found = rows(itself)
    assert list(found) == [(t, c) for t in (0.0, 0.7) for c in ("chat", "code", "all")]
    for r in found.values():
        assert r["tokens"] == 12 * r["prompts"]
        assert r["mean_acceptance_length"] == pytest.approx(4.0)
        assert r["accepted_at"] == pytest.approx([1.0] * 3)
    assert [found[0.0, c]["prompts"] for c in ("chat", "code", "all")] == [2, 1, 3]
    assert json.loads(json.dumps(itself)) == itself


def test_weights_in_8_bits(folder, capsys):
    """Of target and draft independently. The target in the same form is still a perfect draft."""
    options = {"num_speculative_tokens": 3, "max_tokens": 12, "temperatures": (0.0,), "progress": False}
    both = evaluate.evaluate(folder, folder, PROMPTS, quantization="int8", draft_quantization="int8", **options)
    assert rows(both)[0.0, "all"]["mean_acceptance_length"] == pytest.approx(4.0)
    evaluate.show(both)
    assert f"{folder} in int8 for {folder} in int8 (float32)" in capsys.readouterr().out
    with pytest.raises(UserError, match="quantization='int3' is unknown"):
        evaluate.evaluate(folder, folder, PROMPTS, draft_quantization="int3", **options)


@pytest.mark.thorough
def test_a_tree(folder, other):
    """Under the coupled rule, which is the trees' own; a perfect draft's likeliest first token is always right."""
    options = {"num_speculative_tokens": 4, "tree": (2, 3, 6), "max_tokens": 12, "progress": False}
    document = evaluate.evaluate(folder, folder, PROMPTS, **options)
    assert (document["num_speculative_tokens"], document["tree"], document["rule"]) == (3, [2, 3, 6], "coupled")
    for r in document["rows"]:
        assert len(r["accepted_at"]) == 3
        assert r["accepted_at"][0] == pytest.approx(1.0)
        assert r["mean_acceptance_length"] == pytest.approx(1 + sum(r["accepted_at"]))
    with pytest.raises(UserError, match="does not verify trees"):
        evaluate.evaluate(folder, other, PROMPTS, rule="block", **options)


@pytest.mark.parametrize("said", [["--tree", "4,4"], ["--tree", "4,4,x"], ["--tree", "4,4,17", "-k", "4"]])
def test_what_is_no_tree(folder, capsys, said):
    with pytest.raises(SystemExit) as stop:
        cli.main(["evaluate-draft", "--target", folder, "--draft", folder, *said])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code
    assert "--tree" in line


@pytest.mark.thorough
def test_a_draft_that_knows_nothing(folder, other):
    options = {"num_speculative_tokens": 2, "max_tokens": 12, "temperatures": (0.7,), "progress": False}
    document = evaluate.evaluate(folder, other, PROMPTS, **options)
    found = rows(document)[0.7, "all"]
    assert found["mean_acceptance_length"] < 2.0
    assert found["mean_acceptance_length"] == pytest.approx(1 + sum(found["accepted_at"]))
    assert found["accepted_at"][0] >= found["accepted_at"][1]
    parts = [rows(document)[0.7, category] for category in PROMPTS]
    assert found["num_drafts"] == sum(part["num_drafts"] for part in parts)
    assert evaluate.evaluate(folder, other, PROMPTS, **options) == document  # seeded


@pytest.mark.thorough
def test_a_rule_and_several_samples(folder, other):
    how = {"num_speculative_tokens": 2, "max_tokens": 12, "temperatures": (1.0,), "progress": False, "rule": "block"}
    document = evaluate.evaluate(folder, other, PROMPTS, samples=8, **how)
    assert (document["rule"], document["samples"]) == ("block", 8)
    found = rows(document)
    assert 12 * 8 < found[1.0, "chat"]["tokens"] <= 2 * 12 * 8  # some end by themselves
    assert all(0.0 < r["standard_error"] < 0.2 for r in found.values())


def counted(rounds: int, accepted: int) -> SpecDecodeMetrics:
    return SpecDecodeMetrics(rounds, 2 * rounds, [accepted, 0], rounds + accepted)


def test_an_answer_that_fails_is_told(folder, other, monkeypatch):
    """One of many: what is left of them would be another measurement."""
    generate = evaluate.LLM.generate

    def failing(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        outputs[1].outputs[0].error = "no numbers"
        return outputs

    monkeypatch.setattr(evaluate.LLM, "generate", failing)
    with pytest.raises(RuntimeError, match="an answer failed: no numbers"):
        evaluate.evaluate(folder, other, PROMPTS, num_speculative_tokens=2, max_tokens=4, progress=False)


def test_a_standard_error_does_not_hold_the_prompts_own_difference():
    """Of fixed prompts: what differs between them does not count, what differs between the samples of one does."""
    still = [[counted(10, 2)] * 4, [counted(10, 8)] * 4]
    assert evaluate.row(0.7, "all", still)["standard_error"] == 0.0
    draw = np.random.default_rng(0)
    answers = lambda: [[counted(20, draw.binomial(20, rate)) for _ in range(4)] for rate in (0.2, 0.8, 0.5)]
    found = [evaluate.row(0.7, "all", answers()) for _ in range(400)]
    spread = np.std([r["mean_acceptance_length"] for r in found])
    assert np.mean([r["standard_error"] for r in found]) == pytest.approx(spread, rel=0.1)
    assert evaluate.row(0.7, "all", [[counted(10, 2)], [counted(10, 3)]])["standard_error"] is None


def test_table(itself, capsys):
    evaluate.show(itself)
    out = capsys.readouterr().out
    for word in ("accept. length", "chat", "code", "all", "0.7", "4.00", "100%", "float32", "K = 3"):
        assert word in out, word
    assert max(map(len, out.splitlines()[1:])) <= 80


@pytest.mark.thorough
def test_command(folder, tmp_path, capsys):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps({"chat": ["Hello"]}))
    arguments = ["evaluate-draft", "--target", folder, "--draft", folder, "--max-tokens", "6", "-k", "2"]
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--prompts", str(file), "--json"])
    out, err = capsys.readouterr()
    assert stop.value.code == 0, err
    assert rows(json.loads(out))[0.0, "all"]["mean_acceptance_length"] == 3.0


def test_the_prompts_come_along(folder, tmp_path, capsys, monkeypatch):
    """Wherever the command is given."""
    seen = []
    monkeypatch.setattr(evaluate, "evaluate", lambda target, draft, prompts, **_: seen.append(prompts) or {})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["evaluate-draft", "--target", folder, "--draft", folder, "--json"])
    assert stop.value.code == 0, capsys.readouterr().err
    assert [len(texts) for texts in seen[0].values()] == [16] * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist: give --prompts FILE.json"),
        ("[]", "must hold"),
        ('{"chat": []}', "must hold"),
        ('{"chat": [1]}', "must hold"),
        ('{"chat": "Hello"}', "must hold"),
        ("{", "not a JSON file"),
    ],
)
def test_bad_files_are_told_before_anything_is_loaded(text, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "LLM", lambda *_, **__: pytest.fail("loaded"))
    file = tmp_path / "prompts.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as stop:
        cli.main(["evaluate-draft", "--target", "x", "--draft", "y", "--prompts", str(file)])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
