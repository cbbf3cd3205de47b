"""`jaxspec train-draft` from end to end with tiny models: the draft becomes good, the engine takes it, and a run that
was killed ends as if it had not been."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import checkpoints
from checkpoints import orbax
from jaxspec import LLM, SamplingParams
from jaxspec.cli import main
from jaxspec.common.errors import UserError
from jaxspec.inspect.info import describe
from jaxspec.train import data, kept, loop
from jaxspec.train.preparation import prepare
from jaxspec.train.step import learning_rate
from tests.checkpoints.files import fails
from tests.support import model_folders
from tests.train import runs

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("train")
    runs.write(path)
    return path


@pytest.fixture(scope="module")
def trained(root) -> Path:
    return loop.train(runs.options(root, "draft"))


SHORT = {"steps": 30, "eval_every": 15, "eval_prompts": 2, "eval_tokens": 8}


@pytest.fixture(scope="module")
def alone(root) -> Path:
    """A short run that nothing ended."""
    return loop.train(runs.options(root, "alone", **SHORT))


def journal(folder: Path, name: str) -> list:
    rows = map(json.loads, (folder / loop.JOURNAL).read_text().splitlines())
    return [row[name] for row in rows if name in row]


@pytest.mark.thorough
def test_a_draft_learns_its_target_by_heart(trained):
    """Measured by the engine at K = 4, where 5 is the most."""
    lengths, losses = journal(trained, "acceptance_length"), journal(trained, "loss")
    print("acceptance length", lengths, "loss", losses[0], losses[-1])
    assert len(lengths) == 3
    assert lengths[0] < 1.5
    assert max(lengths) >= 3.5
    assert losses[-1] < 0.5 * losses[0]
    assert journal(trained, "agree")[-1] > 0.8


@pytest.mark.thorough
def test_what_a_run_leaves(trained, root):
    assert (trained / loop.CURVES).read_bytes().startswith(b"\x89PNG")
    assert json.loads((trained / loop.RECIPE).read_text())["learning_rate"] == 6e-3
    config = checkpoints.load_config(checkpoints.resolve(str(trained)))
    assert (config.num_layers, config.width, config.reduced_vocab_size, config.embed_width) == (1, 48, 200, 32)
    assert (config.rare_vocab_size, config.rare_width) == (100, 12)
    stored = orbax.stored_arrays(trained / orbax.PARAMS)
    assert {str(stored[name].dtype) for name in ("embed_in", "layers.0.qkv")} == {"bfloat16"}
    assert "embed" not in stored  # the target's
    assert not list(trained.glob("tokenizer*.json"))


@pytest.mark.thorough
def test_the_draft_speculates_for_its_target(trained, root):
    """Text for text what plain decoding gives, most of it drafted; the measured length is the engine's."""
    prompts = [
        {"prompt_token_ids": ids} for ids in np.load(root / "data" / "shard-00000.npz")["tokens"][:4, :8].tolist()
    ]
    target = str(root / "target")
    speculative = {"model": str(trained), "num_speculative_tokens": 4, "adaptive": False}
    outputs = [
        LLM(target, speculative_config=how, max_model_len=64).generate(prompts, GREEDY, progress=False)
        for how in (None, speculative)
    ]
    plain, drafted = ([out.outputs[0].token_ids for out in found] for found in outputs)
    assert plain == drafted
    assert np.mean([out.metrics.mean_acceptance_length for out in outputs[1]]) >= 3.5


@pytest.mark.thorough
def test_a_draft_without_a_tokenizer_knows_its_targets(trained, root, tmp_path):
    assert describe(str(root / "target"), str(trained))["draft_fits"]
    other = model_folders.write_model(tmp_path / "other", vocab_size=310, text="entirely other words here and there")
    found = describe(str(other), str(trained))
    assert not found["draft_fits"]
    assert "trained for another tokenizer" in found["draft_problem"]
    with pytest.raises(ValueError, match="draft is a draft, which reads ids in its target's table: give its target"):
        LLM(str(trained))


@pytest.mark.thorough
def test_a_draft_reads_its_targets_own_table(trained, root, tmp_path):
    llm = LLM(str(root / "target"), speculative_config={"model": str(trained)}, max_model_len=64)
    target, draft = (llm.engine.runner.params[name]["embed"] for name in ("target", "draft"))
    assert target.unsafe_buffer_pointer() == draft.unsafe_buffer_pointer()
    wider = model_folders.write_model(tmp_path / "wider", vocab_size=runs.VOCAB, width=64)
    with pytest.raises(ValueError, match="'draft' reads a table of 320 ids and width 32, the target's has 320 and 64"):
        LLM(str(wider), speculative_config={"model": str(trained)}, max_model_len=64)
    found = describe(str(wider), str(trained))
    assert not found["draft_fits"]
    assert "the target's has 320 and 64" in found["draft_problem"]


def state(folder: Path) -> dict[str, np.ndarray]:
    """The last checkpoint of a run."""
    path = max((folder / loop.WORK).iterdir(), key=lambda path: int(path.name))
    import orbax.checkpoint.experimental.v1 as ocp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that shardings are read too
        found = ocp.load(path, checkpointable_name="state")
    leaves = jax.tree_util.tree_flatten_with_path(found)[0]
    return {path.name + jax.tree_util.keystr(at): np.asarray(leaf) for at, leaf in leaves}


GOES_NO_FURTHER = """
import pickle, sys, time
from jaxspec.train import loop
from tests.support import few_programs

few_programs.compile_few()  # the programs of the run alone, which are in the compilation cache
loop.missing = lambda: "curves take seconds"
add = loop.Journal.add

def stops(self, row):
    add(self, row)
    if row["step"] == 20:
        time.sleep(3600)

loop.Journal.add = stops
loop.train(pickle.load(sys.stdin.buffer))
"""


def test_a_killed_run_ends_as_if_it_had_not_been(root, alone):
    """The process is killed for good, some steps after its second checkpoint; every bit of the last state is as in a
    run that was left alone."""
    killed = root / "killed"
    process = subprocess.Popen([sys.executable, "-c", GOES_NO_FURTHER], stdin=subprocess.PIPE)
    process.stdin.write(pickle.dumps(runs.options(root, "killed", **SHORT)))
    process.stdin.close()
    deadline = time.monotonic() + 600
    while not (killed / loop.WORK / "15").is_dir():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert max(journal(killed, "step")) in (15, 20)
    loop.train(runs.options(root, "killed", **SHORT, resume=True))
    mine, theirs = state(killed), state(alone)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(mine[name], value, err_msg=name)
    assert journal(killed, "loss") == journal(alone, "loss")
    assert journal(killed, "acceptance_length") == journal(alone, "acceptance_length")


@pytest.mark.thorough
def test_all_ids_teach_too(root):
    """The target in every step, as without a file of what it says."""
    folder = loop.train(runs.options(root, "all", top_n=0, steps=120))
    assert max(journal(folder, "acceptance_length")) >= 2.5
    assert journal(folder, "tv")[-1] < 0.7 * journal(folder, "tv")[0]


@pytest.mark.thorough
def test_the_target_is_asked_once(trained, root, monkeypatch):
    """A draft of another shape, with another vocabulary, learns from the same file."""
    (path,) = (root / "data").glob("top-64-*.bin")
    stamp = path.stat().st_mtime_ns
    monkeypatch.setattr(kept, "ahead", None)
    folder = loop.train(runs.options(root, "second", steps=20, vocab_size=50, width=32, heads=4))
    assert path.stat().st_mtime_ns == stamp
    assert journal(folder, "loss")[-1] < journal(folder, "loss")[0]
    assert len(list((root / "data").glob("*.bin"))) == 1


@pytest.mark.thorough
def test_a_short_run_asks_for_its_own_rows_only(root):
    folder = loop.train(runs.options(root, "short", steps=3, eval_every=3, top_n=7))
    (path,) = (root / "data").glob("top-7-*.bin")
    assert path.stat().st_size == 3 * 8 * runs.LENGTH * 7 * 4
    path.unlink()
    assert folder.is_dir()


@pytest.mark.thorough
def test_without_matplotlib_the_curves_are_left_out(root, monkeypatch, capsys):
    monkeypatch.setattr(loop, "missing", lambda: "pictures need a library")
    folder = loop.train(runs.options(root, "no-curves", steps=1, eval_every=1))
    assert not (folder / loop.CURVES).exists()
    assert "curves.png is left out: pictures need a library\n" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_draft_is_trained_further(trained, root):
    """It begins as good as it was, with its shape and its ids; what contradicts them is refused."""
    shape = dict.fromkeys(("layers", "width", "heads", "kv_heads", "mlp_width", "vocab_size"))
    begun = {"init_from": str(trained), "steps": 20, "eval_every": 20, "learning_rate": 1e-4}
    folder = loop.train(runs.options(root, "further", **begun, **shape))
    best = max(journal(trained, "acceptance_length"))
    assert journal(folder, "acceptance_length")[0] == best
    assert journal(folder, "loss")[0] < 0.5 * journal(trained, "loss")[0]
    one, other = (checkpoints.load_config(checkpoints.resolve(str(path))) for path in (trained, folder))
    assert one == other
    for change, said in (({"width": 32}, "--width 32"), ({"vocab_size": 100}, "--vocab-size 100")):
        with pytest.raises(ValueError, match=f"not {said}: leave {said.split()[0]} out"):
            loop.train(runs.options(root, "further2", **begun, **shape | change))
    assert not (root / "further2").exists()


@pytest.mark.thorough
def test_a_draft_of_another_tokenizer_is_not_trained_further(trained, root, tmp_path):
    text = "entirely other words here and there"
    other = model_folders.write_model(tmp_path / "other", vocab_size=runs.VOCAB, text=text)
    with pytest.raises(ValueError, match="trained for another tokenizer"):
        loop.train(runs.options(root, "x", target=str(other), init_from=str(trained)))
    smaller = model_folders.write_model(tmp_path / "smaller", vocab_size=310)
    with pytest.raises(ValueError, match=r"is a draft for 310 ids, the target has 320"):
        loop.train(runs.options(root, "x", init_from=str(smaller)))


@pytest.mark.thorough
def test_minutes_end_a_run(root, capsys):
    """Though nothing was learned yet: a draft is there, and can be trained further."""
    folder = loop.train(runs.options(root, "brief", minutes=1e-4))
    assert "--minutes 0.0001 are over: stopped after step 0 of 240; --resume continues" in capsys.readouterr().err
    assert len(journal(folder, "acceptance_length")) == 1
    assert max(journal(loop.train(runs.options(root, "brief", resume=True)), "acceptance_length")) > 3


def test_the_schedule_fits_into_the_minutes(tmp_path):
    """And a resumption keeps it."""
    assert loop.steps_that_fit(5000, 30, each=0.1, left=500.0, eval_every=200, last=0.0) == 30 + 4850
    assert loop.steps_that_fit(9000, 30, each=0.1, left=520.0, eval_every=200, last=20.0) == 30 + 2425
    assert loop.steps_that_fit(1000, 30, each=0.1, left=500.0, eval_every=200, last=1.0) == 1000
    assert loop.steps_that_fit(1000, 30, each=0.1, left=-1.0, eval_every=200, last=1.0) == 31
    journal = loop.Journal(tmp_path / "metrics.jsonl", None)
    assert journal.total is None
    journal.add({"step": 30, "total": 4680})
    journal.add({"step": 40, "loss": 1.0})
    assert loop.Journal(tmp_path / "metrics.jsonl", 35).total == 4680
    assert len(loop.Journal(tmp_path / "metrics.jsonl", 35).rows) == 1
    assert loop.Journal(tmp_path / "metrics.jsonl", 20).total is None


def test_learning_rate():
    options = runs.options(Path("x"), "y", learning_rate=1.0, warmup=10)
    rates = [learning_rate(options, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[54] == pytest.approx(0.505)
    assert rates[-1] == pytest.approx(0.01)
    assert rates[10:] == sorted(rates[10:], reverse=True)


REFUSED = [
    ({"--steps": "0"}, "--steps 0 is below 1"),
    ({"--loss": "js:1"}, "--loss 'js' is unknown: use one of kl, rkl, tv"),
    ({"--loss": "kl:0"}, "the weight of kl must be above 0"),
    ({"--layers": "3"}, "--layers 3 exceeds the target's 2"),
    ({"--vocab-size": "321"}, "--vocab-size 321 exceeds the target's 320"),
    ({"--batch-size": "12"}, "--batch-size 12 in 1 parts does not divide over 8 devices"),
    ({"--accumulate": "3"}, "--accumulate 3 does not divide --batch-size 8"),
    ({"--top-n": "-1"}, "--top-n -1 is below 0"),
    ({"--top-n": "321"}, "--top-n 321 exceeds the target's 320 ids: lower it, or give 0 for all"),
    ({"--init-from": "x", "--no-init-from-target": None}, "--init-from x and --no-init-from-target exclude each other"),
    ({"--heads": "5", "--kv-heads": "2"}, "5 query heads do not divide among 2"),
    ({"--learning-rate": "-1"}, "--learning-rate -1.0 must be above 0"),
    ({"--seed": str(1 << 63)}, "--seed 9223372036854775808 is above 9223372036854775807"),
    ({"--learning-rate": "nan"}, "--learning-rate nan must be above 0, and finite"),
    ({"--minutes": "inf"}, "--minutes inf must be above 0, and finite"),
    ({"--weight-decay": "nan"}, "--weight-decay nan must be 0 or more, and finite"),
    ({"--loss": "kl:inf"}, "loss 'kl:inf': give values, each once, with their shares"),
    ({"--loss": "kl:1,kl:2"}, "loss 'kl:1,kl:2': give values, each once, with their shares"),
    ({"--length": "4096"}, "less than one batch"),
    ({"--data": "nowhere"}, "nowhere holds no training data"),
    ({"--resume": None}, "no run was started there"),
]


@pytest.mark.parametrize(("change", "said"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_options_are_told_in_one_line(root, change, said, capsys):
    given = {"--target": root / "target", "--data": root / "data", "--out": root / "refused", "--layers": "1"}
    given |= {"--batch-size": "8", "--length": "64", "--steps": "1"} | change
    with pytest.raises(SystemExit) as stopped:
        main(["train-draft", *(str(word) for pair in given.items() for word in pair if word is not None)])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert not (root / "refused").exists()


def test_a_run_does_not_mix_with_another(alone, root):
    with pytest.raises(FileExistsError, match="not empty"):
        loop.train(runs.options(root, alone.name, **SHORT))
    with pytest.raises(ValueError, match=r"--seed 2, but the run was started with 1"):
        loop.train(runs.options(root, alone.name, **SHORT, resume=True, seed=2))


def test_a_run_does_not_go_on_with_other_data(alone, root, tmp_path):
    """Ids of a reduced vocabulary, and the order of the rows, come of the data."""
    shutil.copytree(alone, tmp_path / "draft")
    shutil.copytree(root / "data", tmp_path / "data")
    data.write_shard(data.shard_path(tmp_path / "data", 1), data.read_shard(data.shard_path(root / "data", 0)))
    data.write_manifest(tmp_path / "data", {"shards": 2})
    with fails(UserError, "--resume", "gives rows", "give the same data"):
        loop.train(runs.options(root, str(tmp_path / "draft"), data=tmp_path / "data", **SHORT, resume=True))


def test_a_journal_whose_last_line_was_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "loss": 2}\n{"step": 20, "lo')
    assert loop.Journal(path, 20).rows == [{"step": 10, "loss": 2}]
    assert path.read_text() == '{"step": 10, "loss": 2}\n'


def test_data_of_another_tokenizer_is_refused(root, tmp_path):
    shutil.copytree(root / "data", tmp_path / "data")
    data.write_manifest(tmp_path / "data", {"shards": 1, "target": "other", "tokenizer": "0" * 64})
    with fails(UserError, "was written by other, which has another tokenizer"):
        prepare(runs.options(root, "none", data=tmp_path / "data"))
    with fails(UserError, "--eval-tokens 600, with prompts 608 tokens, exceeds the maximum length of "):
        prepare(runs.options(root, "none", eval_tokens=600))


def test_a_loss_that_is_no_number_ends_a_run(root, tmp_path, monkeypatch):
    real = loop.make_step

    def broken(*given):
        step = real(*given)

        def run(*arrays):
            state, metrics = step(*arrays)
            return state, metrics | {"loss": metrics["loss"] * np.nan}

        return run

    monkeypatch.setattr(loop, "make_step", broken)
    with fails(UserError, "the loss is not finite at step 10: lower --learning-rate"):
        loop.train(runs.options(root, str(tmp_path / "nan")))
