"""The picture of a run: what was measured is in it, whatever the stages, and nothing else has a place in it."""

from __future__ import annotations

import itertools

import pytest

from jaxspec.bench import picture
from jaxspec.bench.bench_options import STAGES

WAITS = {"mean": 40.5, "p50": 41.5, "p99": 42.5}


def row(stage, batch_size=1, k=None, length=None, **more):
    """Return a row as a run has it. No two rows have the same ms."""
    ms = 1 + STAGES.index(stage) + batch_size / 16 + (k or 0) / 8
    common = {"stage": stage, "way": None, "batch_size": batch_size, "context": 512, "k": k, "ms": ms}
    figures = {"floor_ms": ms / 2, "tokens_per_second": 1000 / ms, "synthetic_acceptance_length": length}
    return common | figures | more


def rows_of(stage, batch_size=1, ks=(4,), length=None):
    if stage in ("target", "draft", "prefill", "plain"):
        return [row(stage, batch_size)]
    if stage == "attention":
        return [row(stage, batch_size, k) for k in (None, *ks)]
    if stage == "adaptive":
        ways = {"off": 1.0, "always": 1.71, "adaptive": 1.83}
        return [row(stage, batch_size, k, 3.0, way=w, speedup=v) for k in ks for w, v in ways.items()]
    if stage == "load":
        waits = {"time_to_first_token_ms": WAITS, "time_per_output_token_ms": dict.fromkeys(WAITS)}
        return [row(stage, batch_size, k, run=run, **waits) for k in ks for run in (1, 2)]
    return [row(stage, batch_size, k, length) for k in ks]


def drawn(rows):
    document = {"rows": rows, "preset": "tiny", "dtype": "float32", "device": "cpu"}
    return picture.figure(document)


def texts(axes) -> set[str]:
    return {text.get_text() for text in axes.texts}


def legend(axes) -> set[str]:
    found = axes.get_legend()
    return {text.get_text() for text in found.get_texts()} if found else set()


def named(axes) -> str:
    """All that tells what a bar is."""
    ticks = " ".join(label.get_text() for label in axes.get_xticklabels())
    return " ".join([axes.get_title(), ticks, axes.get_xlabel(), *legend(axes)])


NAMES = {"speculative": "K 4", "adaptive": "adaptive", "load": "Load", "attention": "Attention", "prefill": "Prefill"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_alone_is_drawn(stage, tmp_path):
    """With its numbers, its name and its settings; and no legend names another one."""
    rows = rows_of(stage)
    found = drawn(rows)
    figures = set().union(*map(texts, found.axes))
    for r in rows:
        ms = stage in picture.COLOURS or stage == "attention"
        wanted = r["speedup"] if stage == "adaptive" else r["ms"] if ms and stage != "plain" else r["tokens_per_second"]
        if r["way"] != "off":
            assert picture.digits(wanted) in figures
    said = " ".join(map(named, found.axes))
    assert NAMES.get(stage, stage) in said
    assert "batch 1" in said
    for other in {"target", "draft", "round", "propose", "score", "verify", "plain"} - {stage}:
        assert other not in said
    picture.draw({"rows": rows, "preset": "x", "dtype": "float32", "device": "cpu"}, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_the_target_stands_beside_the_round():
    (axes,) = drawn([*rows_of("target"), *rows_of("round")]).axes
    assert legend(axes) == {"target", "round", "floor"}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["target", "round"]
    assert axes.get_xlabel() == "batch 1, context 512, K 4"
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == [row("target")["ms"], row("round", k=4)["ms"]]


def test_stages_of_a_round_are_stacked():
    rows = [r for stage in ("round", "propose", "score", "verify") for r in rows_of(stage, ks=(2, 4))]
    (axes,) = drawn(rows).axes
    assert legend(axes) == {"propose", "score", "verify", "round", "floor"}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["round\nK 2", "round\nK 4"]
    for _, bars in itertools.groupby(axes.patches, key=lambda bar: bar.get_x()):
        tops = [0.0]
        for bar in bars:
            assert bar.get_y() == pytest.approx(tops[-1])
            tops.append(bar.get_y() + bar.get_height())


def test_plain_decoding_stands_beside_every_acceptance():
    rows = rows_of("plain") + [r for length in (2.0, 3.0) for r in rows_of("speculative", ks=(2, 4), length=length)]
    (axes,) = drawn(rows).axes
    assert legend(axes) == {"plain", "K 2", "K 4"}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["acceptance 2", "acceptance 3"]
    assert len(axes.patches) == 6


def test_many_panels_are_wrapped():
    """All stages of several settings: no sheet is wider than a screen, and none is lost."""
    rows = [r for stage in STAGES for batch in (1, 16) for r in rows_of(stage, batch, (2, 4))]
    found = drawn(rows)
    assert [axes.get_title() for axes in found.axes] == [
        "Tokens per second",
        "Milliseconds",
        "Attention: milliseconds",
        "Prefill: tokens per second",
        "Speed beside off",
        "Load: tokens per second",
        "Load: ms to the first token",
    ], "a time that no run has is left out"
    assert found.get_size_inches()[0] <= picture.WIDEST
