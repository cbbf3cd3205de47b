"""The command itself, with tiny presets: which rows there are, what they hold, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import cli
from jaxspec.bench import bench_options, measure, models, report
from jaxspec.bench.bench_options import ROUNDS
from jaxspec.bench.clock import Sample
from jaxspec.bench.hardware import Hardware
from jaxspec.bench.models import load
from jaxspec.bench.raw import Raw
from jaxspec.bench.turns import take_turns
from jaxspec.engine import sizing
from jaxspec.engine.runner import fetch
from jaxspec.models.decoder import random_params
from jaxspec.models.model import Model
from tests.drafters.references import eagle
from tests.drafters.references.common import Shape
from tests.support.lively_heads import assistant
from tests.support.model_folders import write_model

LIMITS = Hardware(copy_gb_s=8.0, read_gb_s=16.0, peak_tflops=0.25)
FIELDS = {"preset", "stage", "batch_size", "context", "k", "ms", "spread", "floor_ms", "ratio"}
FIELDS |= {"tokens_per_second", "acceptance_length", "synthetic_acceptance_length", "way"}
CHOSEN = bench_options.BenchOptions(
    preset="tiny+tiny-draft",
    model=None,
    draft=None,
    batch_sizes=(3,),  # not a power of two: one row of the programs is dead
    contexts=(40,),
    ks=(2,),
    lengths=(),
    dtype="auto",
    stages=tuple(s for s in bench_options.STAGES if s != "load"),  # a workload of its own, below
    temperature=0.0,
    kernels=None,
    launches=2,
)
B, CONTEXT, K = 3, 40, 2


@pytest.fixture(scope="module")
def document():
    return measure.run(CHOSEN, LIMITS)


def rows(document, stage, **wanted):
    found = [r for r in document["rows"] if r["stage"] == stage]
    return [r for r in found if all(r[name] == value for name, value in wanted.items())]


@pytest.mark.thorough
def test_document(document):
    assert document.keys() >= {"device", "copy_bandwidth_gb_s", "rows", "compile_seconds", "preset", "dtype"}
    assert (document["copy_bandwidth_gb_s"], document["floor_bandwidth_gb_s"]) == (8.0, 16.0)
    assert document["compile_seconds"] > 0
    assert json.loads(json.dumps(document)) == document


@pytest.mark.thorough
def test_every_stage_has_its_rows(document):
    for stage in CHOSEN.stages:
        assert rows(document, stage), stage
    for r in document["rows"]:
        assert r.keys() >= FIELDS
        assert (r["preset"], r["batch_size"], r["context"]) == ("tiny+tiny-draft", B, CONTEXT)
        assert r["ms"] > 0
        assert 0 < r["spread"][0] <= r["spread"][1]
        assert r["ratio"] == pytest.approx(r["ms"] / r["floor_ms"])
    for stage in ("target", "draft", "prefill", "plain"):
        assert [r["k"] for r in rows(document, stage)] == [None]
    for stage in ("round", "propose", "score", "verify", "speculative"):
        assert [r["k"] for r in rows(document, stage)] == [K]
    assert [r["k"] for r in rows(document, "attention")] == [None, K]


def tiny_bytes(e, f, h, g, d, layers):
    """A pass of a tiny preset in float32: weights, the head once, and the keys and values of B rows. What products read
    lies in bfloat16."""
    matrices = layers * (e * (h + 2 * g) * d + h * d * e + 3 * e * f) + 512 * e
    norms, pages = layers * (2 * e + 2 * d) + e, layers * 2 * g * d * CONTEXT * B
    return 2 * matrices + 4 * (norms + pages), 4 * pages


@pytest.mark.thorough
def test_floors(document):
    """From the shapes of the presets, spelled out: B rows, read at 16 GB/s."""
    target, pages = tiny_bytes(64, 128, 4, 2, 16, 2)
    draft, _ = tiny_bytes(32, 64, 2, 1, 16, 1)
    ms = lambda count: count / 16e9 * 1e3
    expected = {
        "target": ms(target),
        "draft": ms(draft),
        "round": ms(target + K * draft),
        "propose": ms(K * draft),
        "score": ms(target),
        "verify": ms(4 * B * (K + 1) * 512),
        "attention": ms(pages),
        "plain": ms(target),
    }
    for stage, floor in expected.items():
        for r in rows(document, stage):
            assert r["floor_ms"] == pytest.approx(floor), stage
    layer = 64 * 8 * 16 + 4 * 16 * 64 + 3 * 64 * 128
    flop = B * 2 * (2 * layer * (CONTEXT - 1) + 2 * 2 * 4 * 16 * (CONTEXT - 1) ** 2 / 2)
    moved = 4 * 2 * (layer + 2 * 64 + 2 * 16) + 4 * 64
    (prefill,) = rows(document, "prefill")
    assert prefill["floor_ms"] == pytest.approx(max(flop / 0.25e12 * 1e3, ms(moved)))


@pytest.mark.thorough
def test_a_tree_stands_in_place_of_k():
    chosen = dataclasses.replace(CHOSEN, preset="tiny+eagle3", ks=(4,), tree=(2, 2, 5), stages=("round", "propose"))
    found = measure.run(chosen, LIMITS)["rows"]
    assert [(r["stage"], r["k"]) for r in found] == [("round", 4), ("propose", 4)]


@pytest.fixture(scope="module")
def loaded():
    """Arriving, with drafts of which some are accepted; and what the engine was told of speculation."""
    load, told = bench_options.Load(requests=7, prompt_tokens=(8, 40), output_tokens=(3, 6), rate=50.0, runs=2), []
    load_rows = measure.load_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "load_rows", lambda *given: told.append(given[-1]) or load_rows(*given))
        own = {"contexts": bench_options.BenchOptions.contexts, "launches": bench_options.BenchOptions.launches}
        chosen = dataclasses.replace(CHOSEN, **own, stages=("load",), load=load, rates=(0.7, 0.4))
        return measure.run(chosen, LIMITS) | {"told": told}


@pytest.mark.thorough
def test_a_load(loaded):
    first, _ = found = loaded["rows"]
    (told,) = loaded["told"]
    assert (told.adaptive, told.synthetic_acceptance_rates) == (True, (0.7, 0.4))
    assert [(r["stage"], r["run"], r["batch_size"], r["k"], r["requests"]) for r in found] == [
        ("load", run, B, K, 7) for run in (1, 2)
    ]
    for r in found:
        assert 7 * 3 <= r["tokens"] <= 7 * 6
        assert r["tokens"] == first["tokens"]
        assert r["tokens_per_second"] == pytest.approx(1e3 * r["tokens"] / r["ms"])
        assert 1.0 <= r["acceptance_length"] <= K + 1  # 1 where a busy machine lets it draft nothing
        for waits in (r["time_to_first_token_ms"], r["time_per_output_token_ms"]):
            assert 0 < waits["p50"] <= waits["p99"]
            assert 0 < waits["mean"] <= waits["p99"]
        parts = r["seconds"]
        assert sum(parts.values()) - parts["whole"] == pytest.approx(parts["whole"])
    assert first["seconds"]["compile"] > 0


@pytest.mark.thorough
def test_a_load_as_tables(loaded, capsys):
    """Whatever the figures, they fit into 80 columns."""
    waits = {"mean": 43333.3, "p50": 40481.1, "p99": 81011.4}
    slow = dict.fromkeys(("time_to_first_token_ms", "time_per_output_token_ms"), waits)
    report.show(loaded | {"rows": [r | slow for r in loaded["rows"]]})
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("81011.4") == 4
    assert "ms to the first token" in out


@pytest.mark.thorough
def test_speeds(document):
    for stage in ("target", "draft", "plain", "speculative", "adaptive"):
        for r in rows(document, stage):  # ms are those of one token of each of B rows
            assert r["tokens_per_second"] == pytest.approx(1e3 * B / r["ms"])
    (prefill,) = rows(document, "prefill")
    assert prefill["tokens_per_second"] == pytest.approx(1e3 * B * (CONTEXT - 1) / prefill["ms"])
    (propose,) = rows(document, "propose")
    assert propose["ms_per_draft"] == pytest.approx(propose["ms"] / K)
    (plain,) = rows(document, "plain")
    assert plain["acceptance_length"] == 1.0
    (speculative,) = rows(document, "speculative")
    assert 1.0 <= speculative["acceptance_length"] <= K + 1


@pytest.mark.thorough
def test_never_slower(document):
    found = report.settings(rows(document, "adaptive"))
    assert [setting[3] for setting in found] == [1.2, 2.0, 3.0]  # 4 is out of reach with K = 2
    for ways in found.values():
        assert list(ways) == ["off", "always", "adaptive"]
        for r in ways.values():
            assert r["speedup"] == pytest.approx(r["tokens_per_second"] / ways["off"]["tokens_per_second"])
        assert ways["off"]["acceptance_length"] == 1.0


@pytest.mark.thorough
def test_tables(document, capsys):
    report.show(document)
    out = capsys.readouterr().out
    for word in (*CHOSEN.stages, "floor", "ratio", "tokens/s", "always K", "16.0 GB/s"):
        assert word in out, word
    assert out.count("\n") > len(document["rows"]) // 2
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


@pytest.fixture(scope="module")
def raw():
    setup = load(dataclasses.replace(CHOSEN, temperature=1.0))
    return Raw(setup, B, CONTEXT, CHOSEN.speculation(K, None, adaptive=False))


@pytest.fixture(scope="module")
def launched(raw):
    return fetch(raw.launch(K)())


@pytest.mark.thorough
def test_every_launch_starts_at_the_same_place(raw):
    """ROUNDS rounds of all rows, the same tokens each time: nothing drifts, nothing ends early."""
    raw.prefill()()
    launch = raw.launch(K)
    first, again = fetch(launch()), fetch(launch())
    assert int(first.num_rounds) == ROUNDS
    assert (np.asarray(first.proposed)[:B] == K).all()
    assert (np.asarray(first.emitted)[:B] > 0).all()
    assert not np.asarray(first.emitted)[B:].any()
    np.testing.assert_array_equal(first.new_tokens, again.new_tokens)


def test_milliseconds_are_those_of_a_round(monkeypatch):
    """A launch of ROUNDS of them was timed."""
    monkeypatch.setattr(
        measure, "measure", lambda call, launches: Sample(*(ROUNDS * ms for ms in (2.0, 1.0, 3.0, 0.5)))
    )
    assert measure.Point(load(CHOSEN), LIMITS, B, CONTEXT).per_round(None) == Sample(2.0, 1.0, 3.0, 0.5)


@pytest.mark.thorough
def test_there_is_room_where_every_draft_is_accepted():
    """A model that drafts for itself: no row may end while it is timed."""
    setup = load(CHOSEN)
    setup.draft = setup.target
    speculation = CHOSEN.speculation(K, None, adaptive=False)
    result = fetch(Raw(setup, B, CONTEXT, speculation).launch(K)())
    assert (np.asarray(result.emitted)[:B] == K + 1).all()
    (runner,) = take_turns(setup, {"itself": speculation}, batch_size=B, context=CONTEXT, launches=4).values()
    assert runner.counts.mean_acceptance_length == K + 1
    assert runner.passes == (1 / (K + 1), K / (K + 1))


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_launches_read_what_a_prefill_wrote_in_layers_with_a_window(monkeypatch):
    """These layers have a pool of their own for long contexts. Its launches are those of a single pool."""
    found = []
    for alone in (False, True):
        if alone:
            monkeypatch.setattr(sizing, "windows_of", lambda *_: None)
        setup = load(CHOSEN)
        windowed = dataclasses.replace(setup.target.config, windows=(16, None))
        setup.target = dataclasses.replace(setup.target, config=windowed)
        raw = Raw(setup, B, 1500, CHOSEN.speculation(K, None, adaptive=False))
        assert (raw.engine.layout.num_window_pages is None) == alone
        raw.prefill()()
        found.append(fetch(raw.launch(K)()).new_tokens)
        assert int(raw.attention(K)()) == 0
    np.testing.assert_array_equal(*found)


def test_a_draft_that_reads_the_targets_keys_proposes():
    """An assistant has no cache of its own."""
    setup = load(CHOSEN)
    config = assistant(setup.target.config)
    setup.draft = Model(config, random_params(config, setup.dtype, setup.placement.draft))
    raw = Raw(setup, B, CONTEXT, CHOSEN.speculation(K, None, adaptive=False))
    assert int(raw.stage("propose", K)()) == 0


@pytest.mark.parametrize("damage", ["num_rounds", "emitted", "proposed"])
def test_a_launch_that_did_less_is_not_timed(raw, launched, damage):
    result = launched
    raw.check(result, K)
    value = np.array(getattr(result, damage))
    value[...] = 31 if damage == "num_rounds" else np.where(np.indices(value.shape)[0] == 1, K - 2, value)
    with pytest.raises(RuntimeError, match="rounds"):
        raw.check(dataclasses.replace(result, **{damage: value}), K)


def test_stages_write_where_the_round_does(raw):
    """The draft's proposals and the target's scores reach the cache, after the context."""
    raw.engine.runner.cache = jax.tree.map(jnp.zeros_like, raw.engine.runner.cache)
    for stage, part in (("propose", "draft"), ("score", "target")):
        assert not np.asarray(getattr(raw.engine.runner.cache, part)[0].pages).any()
        assert int(raw.stage(stage, K)()) == 0  # what ties the iterations together never becomes anything else
        assert np.asarray(getattr(raw.engine.runner.cache, part)[0].pages).any()
    assert int(raw.stage("verify", K)()) == 0
    assert int(raw.attention(K)()) == 0


@pytest.mark.thorough
def test_a_head_beside_a_model(tmp_path, capsys):
    """Of a folder, as `train-draft` writes it; it decodes nothing alone."""
    target = write_model(tmp_path / "target")
    shape = Shape(vocab_size=320, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48, layers=8)
    eagle.write(tmp_path / "head", seed=0, target=shape)
    stages = ("target", "draft", "round", "propose")
    chosen = {"preset": None, "model": str(target), "draft": str(tmp_path / "head"), "stages": stages}
    found = measure.run(dataclasses.replace(CHOSEN, **chosen), LIMITS)["rows"]
    assert [r["stage"] for r in found] == ["target", "round", "propose"]
    assert "draft: skipped, because a head does not decode by itself" in capsys.readouterr().err


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", *arguments])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


SHORT = ("--batch-size", "1", "--context", "24", "-k", "2", "--launches", "1", "--stages")


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.setattr(measure, "hardware", lambda dtype: LIMITS)


@pytest.mark.parametrize(
    ("stages", "option", "wanted"),
    [
        (
            "round,speculative",
            ("--synthetic-acceptance-rates", "1,0.5"),
            [("round", 2, 2.5), ("speculative", 2, 2.5)],
        ),
        pytest.param(
            "round,speculative",
            ("--synthetic-acceptance-length", "1.5,3"),
            [("round", 2, 1.5), ("round", 2, 3.0), ("speculative", 2, 1.5), ("speculative", 2, 3.0)],
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "adaptive,load",
            ("--synthetic-acceptance-rates", "1,1"),
            [("adaptive", 2, 3.0)] * 3 + [("load", 2, 3.0)],
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "load",
            ("-k", "2,4", "--synthetic-acceptance-length", "1,2"),
            [("load", 2, 1.0), ("load", 2, 2.0), ("load", 4, 1.0), ("load", 4, 2.0)],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_every_stage_that_accepts_does_so_as_often_as_it_is_told(capsys, limits, stages, option, wanted):
    few = ("--batch-size", "1", "-k", "2", "--stages", stages)
    few += ("--context", "24", "--launches", "2") if stages != "load" else ()
    few += ("--requests", "2", "--runs", "1", "--prompt-tokens", "8", "--output-tokens", "65") * ("load" in stages)
    code, out, err = run(capsys, "--preset", "tiny+tiny-draft", *few, *option, "--json")
    assert code == 0, err
    found = json.loads(out)["rows"]
    assert [(r["stage"], r["k"], r["synthetic_acceptance_length"]) for r in found] == wanted
    for r in found:
        asked, length = r["synthetic_acceptance_length"], r["acceptance_length"]
        if asked in (1.0, r["k"] + 1.0) and r["way"] in (None, "always") and r["stage"] != "load":
            assert length == asked
        elif r["stage"] in ("round", "speculative"):
            assert abs(length - asked) < 0.35, "by chance, of 64 rounds and more"


def test_json_is_all_there_is_on_standard_output(capsys, limits, tmp_path):
    picture = tmp_path / "bench.png"
    extra = ("--json", "--plot", str(picture), "--synthetic-acceptance-length", "2")
    code, out, err = run(capsys, "--preset", "tiny", *SHORT, "round,speculative", *extra)
    assert code == 0, err
    document = json.loads(out)
    assert [r["stage"] for r in document["rows"]] == ["round", "speculative"]
    assert document["rows"][1]["synthetic_acceptance_length"] == 2.0
    assert document["rows"][0]["floor_ms"] < 0.1  # n-gram drafts cost no pass
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert "making tiny (float32)" in err
    assert "times its floor" in err


def test_settings_that_do_not_fit_are_left_out(capsys, limits, monkeypatch):
    """The figures of the others are printed. If nothing fits, the command fails with the reason."""
    monkeypatch.setattr(models, "memory", lambda device: {"bytes_limit": 2_000_000, "bytes_in_use": 0})
    code, out, err = run(capsys, "--preset", "tiny", *SHORT, "round", "--json", "--batch-size", "1,64")
    assert code == 0, err
    document = json.loads(out)
    assert [r["batch_size"] for r in document["rows"]] == [1]
    (left_out,) = document["left_out"]
    assert (left_out["batch_size"], left_out["reason"].split(" needs")[0]) == (64, "the cache")
    assert re.search(r"  batch 64, context \d+: left out, because the cache needs", err)
    code, out, err = run(capsys, "--preset", "tiny", *SHORT, "round", "--json", "--batch-size", "64")
    assert code != 0
    assert not out
    assert "jaxspec: the cache needs" in err


@pytest.mark.thorough
def test_of_several_k_each_is_timed(capsys, limits, tmp_path):
    """Also one that is neither the largest nor its half, which are those that an engine compiles."""
    extra = ("--json", "--plot", str(tmp_path / "bench.png"), "-k", "2,3,4")
    code, out, err = run(capsys, "--preset", "tiny+tiny-draft", *SHORT, "round,propose,score,verify,attention", *extra)
    assert code == 0, err
    found = json.loads(out)["rows"]
    for stage in ("round", "propose", "score", "verify"):
        assert [r["k"] for r in found if r["stage"] == stage] == [2, 3, 4]
    assert [r["k"] for r in found if r["stage"] == "attention"] == [None, 2, 3, 4]
    propose = [r["floor_ms"] for r in found if r["stage"] == "propose"]
    assert propose == pytest.approx([k * propose[0] / 2 for k in (2, 3, 4)])


@pytest.mark.thorough
def test_never_slower_of_several_k(capsys, limits):
    extra = ("--json", "--never-slower", "-k", "1,2", "--synthetic-acceptance-length", "1.5")
    code, out, err = run(capsys, "--preset", "tiny", *SHORT, "plain", *extra)
    assert code == 0, err
    ways = [(r["k"], r["way"]) for r in json.loads(out)["rows"] if r["stage"] == "adaptive"]
    assert ways == [(k, way) for k in (1, 2) for way in ("off", "always", "adaptive")]


@pytest.mark.thorough
def test_a_real_model(capsys, limits, tmp_path):
    """With prompts of text, in its own tokens."""
    folder = str(write_model(tmp_path / "model"))
    code, out, err = run(capsys, "--model", folder, "--draft", folder, *SHORT, "draft,speculative", "--json")
    assert code == 0, err
    draft, speculative = json.loads(out)["rows"]
    assert draft["preset"] == f"{folder}+{folder}"
    assert speculative["acceptance_length"] > 2.5  # it drafts for itself, and all is accepted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "qwen3-9b"], "--preset 'qwen3-9b' is unknown (did you mean qwen3-8b?): use one of qwen3-0.6b,"),
        (["--preset", "tiny+tinny"], "--preset 'tinny' is unknown (did you mean tiny?)"),
        (["--preset", "tiny", "--model", "x"], "give one of --preset (random weights) and --model (a real model)"),
        (["--preset", "tiny", "--draft", "x"], "--draft x needs --model: give a preset's draft as target+draft"),
        (["--batch-size", "1,zero"], "--batch-size '1,zero': give whole numbers of at least 1"),
        (["--context", "1"], "--context '1': give whole numbers of at least 2"),
        (["-k", ""], "-k '': give whole numbers of at least 1"),
        (["--preset", "tiny", "--context", "64,2000"], "--context 2000 is too long for tiny: with the output"),
        (["--stages", "plain", "--max-model-len", "2048"], "--max-model-len belongs to the stage load, which is not"),
        (["--stages", "plain,target", "-k", "2"], "-k belongs to the stages attention, propose, score, verify, round,"),
        (
            ["--stages", "prefill", "--synthetic-acceptance-rates", "1"],
            "-rates belongs to the stages round, speculative",
        ),
        (
            ["--stages", "plain", "--synthetic-acceptance-length", "2"],
            "-length belongs to the stages round, speculative",
        ),
        (["--stages", "load", "--synthetic-acceptance-rates", "1,0,0,0"], "-rates belongs to the stages round, specul"),
        (
            ["--stages", "load", "--preset", "tiny+tiny-draft", "--context", "64"],
            "--context belongs to the stages target",
        ),
        (["--stages", "load", "--launches", "3"], "--launches belongs to the stages target, draft, round"),
        (
            ["--stages", "score,attention,prefill", "--temperature", "1"],
            "--temperature belongs to the stages target, dra",
        ),
        (["--stages", "target,plain", "--model", "x", "--draft", "y"], "--draft belongs to the stages draft, propose"),
        (
            ["--draft-tensor-parallel-size", "1"],
            "--draft-tensor-parallel-size needs a draft: give --preset target+draft",
        ),
        (["--stages", "plain", "--tree", "2,2,5", "--preset", "tiny+eagle3"], "--tree belongs to the stages propose"),
        (["--tree", "2,2,5", "-k", "3", "--preset", "tiny+eagle3"], "--tree replaces -k 3: leave -k out"),
        (
            ["-k", "2,4", "--synthetic-acceptance-rates", "1,0.5"],
            "gives 2 rates, K = 4 needs 4: give as many, or leave",
        ),
        (["-k", "2", "--synthetic-acceptance-rates", "0.5,1"], "must be 2 probabilities that do not increase"),
        (["--synthetic-acceptance-rates", "1", "--synthetic-acceptance-length", "2"], "are both given: drop one"),
        (["-k", "2,4", "--synthetic-acceptance-length", "4"], "length 4 is out of reach with K = 2, a round yields at"),
        (["--synthetic-acceptance-length", "nan"], "--synthetic-acceptance-length 'nan': give numbers of at least 1"),
        (["--stages", "target,warp"], "--stages='warp' is unknown: use one of target, draft, round"),
        (["--stages", "draft"], "--stages draft needs a draft model: give --preset target+draft"),
        (["--stages", ","], "--stages ',' names no stage: use some of target"),
        (["--dtype", "int3"], "--dtype='int3' is unknown: use one of auto"),
        (["--kernels", "cuda"], "--kernels='cuda' is unknown: use one of reference, pallas"),
        (["--temperature", "-1"], "--temperature -1.0 must lie in [0, 1e6]; 0 is greedy"),
        (["--launches", "0"], "--launches 0 is below 1"),
        (["--plot", "x.jpg"], "give a name that ends in .png"),
        (["--plot", "/no/such/folder/x.png"], "the folder /no/such/folder does not exist: make it first"),
    ],
)
def test_bad_input_is_told_before_anything_is_measured(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(measure, "run", lambda *_: pytest.fail("measured"))
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert line.startswith("jaxspec: ")
    assert message in line
