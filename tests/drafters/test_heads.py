"""Heads that read the target's hidden states: what they propose in every round is what a plain reference proposes,
whatever the engine did in between, and the text is plain decoding's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.common.errors import UserError
from jaxspec.engine.engine import Engine
from jaxspec.engine.runner import fetch
from jaxspec.options.sampling_params import SamplingParams
from tests.drafters.references import dflash, dspark, eagle, eagle3, medusa, mlp, mtp, pard
from tests.drafters.references.common import Shape, another
from tests.drafters.rounds import Pair, check, recording
from tests.support.model_folders import write_model
from tests.support.sizes import cases
from tests.support.tiny_models import engine, outputs, run

K, VOCAB = 4, 320
TARGET = Shape(vocab_size=VOCAB, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48, layers=4, rope_theta=5e5, eps=1e-5)
PROMPT = tuple(int(i) for i in np.random.default_rng(3).integers(5, VOCAB, 45))
CHUNK = 16
SIZES = {"page_size": 8, "prefill_chunk": CHUNK, "max_num_seqs": 4, "num_pages": 60, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=14)


@dataclasses.dataclass(frozen=True)
class Head:
    """A reference with options of its `write`, and its proposals, where these are not its only ones."""

    reference: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    proposals: Any = None


TAPS = {"layer_ids": (0, 2, 3)}
HEADS = {
    "eagle3": Head(eagle3, TAPS),
    "eagle3, residual from the norm": Head(eagle3, TAPS | {"norm_before_residual": True, "draft_vocab_size": None}),
    "eagle3, all norms": Head(eagle3, TAPS | {"norm_before_fc": True, "fc_norm": True, "norm_output": True}),
    "eagle3 by speculators": Head(eagle3, {"layer_ids": (1, 2, 4, 4), "speculators": True}),
    "eagle3, another width": Head(eagle3, {"layer_ids": (2, 1, 1), "width": 48, "rope_theta": False}),
    "eagle3, two layers": Head(eagle3, TAPS | {"first_layer": "layers.0.", "layers": 2}),
    "eagle3, layers by default": Head(eagle3, {"first_layer": "layers.0."}),
    "eagle3, nested": Head(eagle3, TAPS | {"nested": True}),
    "eagle": Head(eagle),
    "eagle, a table of its own": Head(eagle, {"embed": another(TARGET)}),
    "eagle, biases of attention": Head(eagle, {"qkv_bias": True}),
    "eagle3, a table of its own": Head(eagle3, TAPS | {"embed": another(TARGET)}),
    "eagle3, biases of attention": Head(eagle3, TAPS | {"qkv_bias": True}),
    "eagle without a bias": Head(eagle, {"bias": False, "rope_theta": False}),
    "eagle by vLLM": Head(eagle, {"vllm": 40}),
    "mtp": Head(mtp, {"kind": "deepseek"}),
    "mtp, a table and a head of its own": Head(
        mtp, {"kind": "deepseek", "table": another(TARGET), "head": another(TARGET, 6)}
    ),
    "mtp by MiMo": Head(mtp, {"kind": "mimo"}, functools.partial(mtp.proposals, before_norm=True)),
    "mtp by Qwen3-Next": Head(mtp, {"kind": "qwen3_next"}),
    "medusa": Head(medusa, {"heads": 5}),
    "medusa, two blocks, the target's head": Head(medusa, {"heads": 4, "layers": 2, "own_head": False}),
    "medusa by vLLM": Head(medusa, {"heads": 4, "vllm": True, "bias": False}),
    "mlp_speculator": Head(mlp, {"n_predict": 4}),
    "mlp_speculator, tied and scaled": Head(mlp, {"n_predict": 5, "tied": True, "scaled": True}),
    "mlp_speculator of old": Head(mlp, {"n_predict": 4, "tied": None, "scaled": None, "inner_said": False}),
    "p-eagle": Head(eagle3, TAPS | {"mask_token_id": 5, "norm_before_fc": True}, eagle3.parallel_proposals),
    "pard": Head(pard),
    "dflash": Head(dflash, {"layer_ids": (0, 1, 3), "block_size": 7}),  # longer than K + 1
    "dflash, a block of K + 1": Head(dflash, {"layer_ids": (0, 1, 3)}),
    "dflash, biases of attention": Head(dflash, {"layer_ids": (0, 1, 3), "qkv_bias": True}),
    "dflash by speculators": Head(dflash, {"layer_ids": (2,), "speculators": True}),
    "dspark": Head(dspark, {"layer_ids": (-1, 1, 2), "block_size": 6}),  # more than K
    "dspark, a table and a head of its own": Head(
        dspark, TAPS | {"embed": another(TARGET), "head_of_logits": another(TARGET, 6)}
    ),
    "dspark, gated, by speculators": Head(dspark, TAPS | {"kind": "gated", "speculators": True}),
    "dspark, rnn": Head(dspark, TAPS | {"kind": "rnn", "speculators": True, "from_pending": False}),
    "dspark, rnn, the target's table": Head(dspark, TAPS | {"kind": "rnn", "table": False}),
    "dspark without its head": Head(dspark, TAPS | {"rank": None}),
}
QUICK = ["eagle3", "eagle", "mtp", "medusa", "mlp_speculator", "dflash", "p-eagle", "pard", "dspark"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Any:
    """Name -> (target's folder, head's)."""
    base = tmp_path_factory.mktemp("heads")

    @functools.cache
    def made(name: str) -> tuple[Path, Path]:
        head, place = HEADS[name], base / str(list(HEADS).index(name))
        target = write_model(place / "target", layers=TARGET.layers, vocab_size=VOCAB, rope_theta=TARGET.rope_theta)
        head.reference.write(place / "head", seed=0, target=TARGET, **head.options)
        if head.reference is not pard:  # a head's own context is seldom meant: drafting goes on beyond it
            config = place / "head" / "config.json"
            config.write_text(config.read_text().replace('_embeddings": 2048', '_embeddings": 8'))
        if head.reference is mtp:  # it stands in the target's own checkpoint
            within = load_file(place / "head" / "model.safetensors")
            save_file(load_file(target / "model.safetensors") | within, target / "model.safetensors")
            return target, target
        return target, place / "head"

    return made


def reference(folders: tuple[Path, Path], name: str, longest: int = SIZES["max_model_len"]):
    """The plain one, over that target's table and head; longest: of the context."""
    head, folder = HEADS[name], folders[1]
    if head.reference is mtp:
        folder = folder.parent / "head"
    ends = {"longest": longest} if head.reference in (dflash, dspark) else {}
    return functools.partial(head.proposals or head.reference.proposals, folder, **ends)


def read(folders, name: str) -> Pair:
    return Pair.read(*folders(name), method="mtp" if HEADS[name].reference is mtp else None)


def one_shape(engine: Engine) -> Engine:
    """Compiling takes longest by far."""
    engine.grown_shape = lambda *requests: (4, 16)  # type: ignore[method-assign]
    return engine


@cases("name", list(HEADS), quick=["eagle3", "dflash", "dspark", "medusa"])
def test_every_round_proposes_what_the_reference_does(folders, name, monkeypatch):
    """Prompts of one token, of one page, of several chunks; then the same pages again, with another token after them;
    samples of one prompt; a row that drafts less, and one that drafts nothing for a while."""
    pair, rounds = read(folders, name), recording(monkeypatch)
    served = one_shape(pair.engine(K, **SIZES))
    prompts = [PROMPT[:1], PROMPT[:8], PROMPT, (*PROMPT[:24], 7, 9), (*PROMPT[:25], 7, 9)]
    plain = outputs(one_shape(engine(pair.target, **SIZES)), prompts, GREEDY)
    assert outputs(served, prompts[:3], GREEDY) == plain[:3]
    assert outputs(served, prompts[3:], GREEDY) == plain[3:]
    few = SamplingParams(temperature=0.0, max_tokens=14, num_speculative_tokens=2)
    assert outputs(served, [PROMPT], few) == plain[2:3]
    samples, together = served.add(PROMPT[:20], SamplingParams(temperature=0.0, max_tokens=9, n=3)).samples, 0
    while served.busy:
        served.step(1)  # so that the first still runs when the others come, and copy its last page
        together += len(served.scheduler.running) == 3
    assert len({tuple(s.output) for s in samples}) == 1
    assert together
    jax.effects_barrier()
    seen = len(rounds)
    assert check(folders(name)[0], rounds, reference(folders(name), name)) > 2 * K * len(prompts)
    assert {len(one.drafts) for one in rounds} >= {2, K}
    # Speculation pauses, as when many requests run, and comes back: within what the first pass reads, and after more
    # than a chunk of a prompt.
    paused = served.add(PROMPT[:13], SamplingParams(temperature=0.0, max_tokens=60))
    for rounds_without in (3, CHUNK + 5):
        served.step(1)
        served.apply_result([paused], fetch(served.runner.start(served.launch([paused], 0, rounds_without))))
    while served.busy:
        served.step()
    jax.effects_barrier()
    assert len(rounds) > seen
    check(folders(name)[0], rounds[seen:], reference(folders(name), name))


@cases("name", ["dflash", "dspark", "eagle3"], quick=["dflash"])
def test_at_the_end_of_the_context(folders, name, monkeypatch):
    """Where there is room for fewer drafts, and for a part of a block only."""
    pair, rounds = read(folders, name), recording(monkeypatch)
    longest, sampling = len(PROMPT) + 11, SamplingParams(temperature=0.0, max_tokens=11)
    sizes = SIZES | {"max_model_len": longest}
    plain = outputs(engine(pair.target, **sizes), [PROMPT], sampling)
    assert outputs(pair.engine(K, **sizes), [PROMPT], sampling) == plain
    jax.effects_barrier()
    check(folders(name)[0], rounds, reference(folders(name), name, longest))
    assert min(len(one.drafts) for one in rounds) < K


@cases("name", QUICK, quick=["eagle3"])
def test_accepted_drafts(folders, name, monkeypatch):
    """Random heads are hardly ever right, so here drafts are accepted by lot. What the next rounds propose is the
    reference's, whether all were accepted or none; prompts share beginnings that end at a page's end and beside it."""
    pair, rounds = read(folders, name), recording(monkeypatch)
    lots = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (0.8, 0.6, 0.45, 0.3)}
    served = one_shape(pair.engine(K, **SIZES, spec=lots))
    pages = {n * SIZES["page_size"] + beside for n in (1, 2, 3) for beside in (-1, 0, 1)}
    for shared in sorted(pages):
        run(served, [(*PROMPT[:shared], 7, 9, 11), (*PROMPT[:shared], 8)], GREEDY)
    gained = served.metrics.num_accepted_tokens_per_pos
    assert min(a - b for a, b in itertools.pairwise([served.metrics.num_drafts, *gained, 0])) > 0, "each number of them"
    jax.effects_barrier()
    check(folders(name)[0], rounds, reference(folders(name), name))


@cases("name", ["medusa", "eagle3", "dflash"], rest=["eagle3"])  # the soak has all
def test_sampled_rows_and_few_pages(folders, name, monkeypatch):
    """Rows with a seed say what plain decoding says, whatever the penalties, and what it would log; those without one
    take q along. The pool is too small for all: rows give way, and come back."""
    pair, rounds = read(folders, name), recording(monkeypatch)
    sizes, length = SIZES | {"num_pages": 16}, {"max_tokens": 40}
    sampling = [
        SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.3, logprobs=2, **length),
        SamplingParams(temperature=0.7, seed=4, top_k=20, **length),
        SamplingParams(temperature=1.0, **length),
        SamplingParams(temperature=0.0, **length),
    ]
    prompts, served = [PROMPT[i : i + 16 + i] for i in range(4)], one_shape(pair.engine(K, **sizes))
    requests = run(served, prompts, sampling)
    assert served.scheduler.num_preemptions
    plain = run(one_shape(engine(pair.target, **SIZES)), prompts, sampling)
    assert [r.error for r in requests] == [None] * 4
    for i in (0, 1, 3):
        assert requests[i].output == plain[i].output
    found, wanted = ([t.logprob for t in r.logprobs] for r in (requests[0], plain[0]))
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    jax.effects_barrier()
    mine = [one for one in rounds if tuple(one.tokens[: len(prompts[3])]) == prompts[3]]
    assert check(folders(name)[0], mine, reference(folders(name), name)) >= 2 * K


def test_a_head_of_another_method_is_refused(folders):
    with pytest.raises(UserError, match="method='eagle', but 'head' is a checkpoint of method 'medusa': leave"):
        Pair.read(*folders("medusa"), method="eagle")
    pair = read(folders, "medusa")
    with pytest.raises(UserError, match="num_speculative_tokens=6, but the draft proposes at most 5 a round: lower it"):
        pair.engine(6, **SIZES)
    with pytest.raises(UserError, match="num_speculative_tokens=9, but the draft proposes at most 6 a round"):
        read(folders, "dflash").engine(9, **SIZES)
