"""Trees of drafts: each round's is what brute force over a plain reference finds, and the text is plain decoding's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.common.errors import UserError
from jaxspec.decode import round as round_module
from jaxspec.drafters.base import Proposal
from jaxspec.drafters.trees.growth import Shape, of_levels
from jaxspec.drafters.trees.topology import topology
from jaxspec.models.paged import PagedModel
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.verify import tree as rule
from tests.drafters.references import common, pard
from tests.drafters.rounds import Pair, states, up_to
from tests.drafters.test_heads import GREEDY, PROMPT, SIZES, folders, read, reference  # noqa: F401
from tests.support import lively_heads, lively_models, tiny_models
from tests.support.lively_models import PROMPTS, new_engine, params, serve, texts, total
from tests.support.sizes import cases

WIDTH, DEPTH, NODES = 3, 3, 10
TREE = {"tree_width": WIDTH, "tree_depth": DEPTH, "tree_nodes": NODES}
CHOICES = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [2]]
grow = jax.jit(of_levels, static_argnums=0)


# What is proposed: against brute force.


def best_tree(logits_after: Callable[[tuple[int, ...]], np.ndarray], count: int) -> tuple[dict, float]:
    """(path -> score, of all candidates of EAGLE-2; the score of the last that is kept)."""

    def children(path, score):
        z = logits_after(path)
        logs = z - np.logaddexp.reduce(z)
        return {(*path, int(i)): score + logs[i] for i in np.argsort(-logs, kind="stable")[:WIDTH]}

    level = children((), 0.0)
    found = dict(level)
    for _ in range(1, DEPTH):
        nodes = sorted(level, key=lambda path: -level[path])[:WIDTH]
        level = dict(itertools.chain.from_iterable(children(path, level[path]).items() for path in nodes))
        found |= level
    return found, sorted(found.values())[-count]


def recording(monkeypatch) -> list[tuple[list[int], list[tuple[int, ...]]]]:
    """(committed tokens, the paths of the drafts) of each row and round."""
    rounds = []

    def keep(tokens, num_tokens, drafts, parents, num_proposed):
        for row in np.flatnonzero(num_proposed):
            paths = [()]
            for i in range(num_proposed[row]):
                paths.append((*paths[parents[row, i + 1]], int(drafts[row, i])))
            rounds.append((tokens[row, : num_tokens[row]].tolist(), paths[1:]))

    propose = round_module.propose

    def recorded(context, cache, history, adjust=None):
        proposal, cache = propose(context, cache, history, adjust)
        if proposal.tree is not None:
            jax.debug.callback(
                keep, history.tokens, history.num_tokens, proposal.tokens, proposal.tree.parents, proposal.num_proposed
            )
        return proposal, cache

    monkeypatch.setattr(round_module, "propose", recorded)
    return rounds


@cases(
    "name",
    ["eagle3", "medusa", "mlp_speculator", "draft_model", "dflash", "p-eagle", "dspark"],
    quick=["eagle3"],
)
def test_every_round_grows_the_tree_that_brute_force_finds(folders, name, monkeypatch):  # noqa: F811
    of = "pard" if name == "draft_model" else name
    pair, rounds, target = read(folders, of), recording(monkeypatch), folders(of)[0]
    spec = TREE | {"num_speculative_tokens": 4} | ({"parallel_drafting": False} if name == "draft_model" else {})
    served = pair.engine(4, spec=spec, **SIZES)
    prompts = [PROMPT[:8], PROMPT[:21]]
    sampling = SamplingParams(temperature=0.0, max_tokens=5)
    plain = tiny_models.outputs(tiny_models.engine(pair.target, **SIZES), prompts, sampling)
    assert tiny_models.outputs(served, prompts, sampling) == plain
    jax.effects_barrier()
    assert len(rounds) >= 4
    independent = served.runner.decoding.drafter.draft.independent
    proposals = pard.proposals if name == "draft_model" else reference(folders(of), of)
    for tokens, paths in rounds:
        said = up_to(states(target, tokens), len(tokens) - 1)

        def logits_after(path, said=said, tokens=tokens):
            if name == "draft_model":
                return spread(proposals(folders(of)[1], said, [*tokens, *path], 1)[1][0])
            if independent:
                return spread(proposals(said, tokens, DEPTH)[1][len(path)])
            forced = iter([*path, *[0] * DEPTH])
            with monkeypatch.context() as patch:
                patch.setattr(common, "greedy", lambda logits, own_ids=None: next(forced))
                return spread(proposals(said, tokens, DEPTH)[1][len(path)])

        def spread(logits, said=said):
            """Over the target's ids."""
            own = own_ids(pair)
            if own is None:
                return logits
            wide = np.full(said.head.shape[0], -np.inf)
            wide[own] = logits
            return wide

        candidates, last = best_tree(functools.cache(logits_after), NODES - 1)
        assert len(set(paths)) == len(paths) == NODES - 1
        assert all(path in candidates and candidates[path] > last - 1e-3 for path in paths)


def own_ids(pair: Pair) -> np.ndarray | None:
    return np.asarray(pair.head.params["d2t"]) if "d2t" in pair.head.params else None


def test_the_first_drafts_are_the_best_smaller_tree():
    draw = np.random.default_rng(0)
    scores = -np.sort(draw.exponential(size=(5, DEPTH, WIDTH)).astype(np.float32))
    ids = jnp.asarray(draw.permuted(np.tile(np.arange(9), (5, DEPTH, 1)), axis=2)[:, :, :WIDTH].astype(np.int32))
    levels = jnp.full(5, DEPTH)
    trees = [grow(Shape(WIDTH, DEPTH, count), ids, jnp.asarray(scores), levels) for count in (4, 9)]
    (small, small_tree, _), (large, large_tree, possible) = trees
    np.testing.assert_array_equal(small, large[:, :4])
    np.testing.assert_array_equal(small_tree.parents, large_tree.parents[:, :5])
    assert (possible == 9).all()
    assert (large_tree.parents[:, 1:] < np.arange(1, 10)).all()
    assert not (large_tree.depth[:, 1:] != np.take_along_axis(np.asarray(large_tree.depth), np.asarray(large_tree.parents), 1)[:, 1:] + 1).any()  # fmt: skip # noqa: E501


def test_levels_that_are_not_proposed_and_ids_that_are_not_possible():
    scores = jnp.array([[[-1.0, -2.0], [-1.0, -2.0]], [[-1.0, -jnp.inf], [-0.5, -jnp.inf]]])
    ids = jnp.arange(8, dtype=jnp.int32).reshape(2, 2, 2)
    _, tree, possible = grow(Shape(2, 2, 6), ids, scores, jnp.array([1, 2]))
    assert possible.tolist() == [2, 2]  # of the second: one after the other
    assert tree.depth[1, :3].tolist() == [0, 1, 2]


def test_topology():
    """Against walking up from each place."""
    draw = np.random.default_rng(1)
    parents = np.array([[0, *(draw.integers(max(0, j - 3), j) for j in range(1, 40))] for _ in range(4)])
    tree = jax.tree.map(np.asarray, jax.jit(topology, static_argnums=1)(jnp.asarray(parents, jnp.int32), 39))
    for row, j in np.ndindex(4, 40):
        path = [j]
        while path[0]:
            path.insert(0, parents[row, path[0]])
        assert tree.depth[row, j] == len(path) - 1
        assert tree.paths[row, j, : len(path)].tolist() == path
        assert np.flatnonzero(tree.ancestors[row, j]).tolist() == path


def test_the_walk():
    """Row 0 goes two deep, past a sibling that differs; row 1 fits nowhere; row 2 may propose only the first two; row 3
    fits below a place that does not; row 4 has no token of the target's where it would go on."""
    parents = jnp.broadcast_to(jnp.array([0, 0, 0, 2, 2], jnp.int32), (5, 5))
    drafts = jnp.broadcast_to(jnp.array([3, 4, 5, 6], jnp.int32), (5, 4))
    y = jnp.array([[4, 0, 6, 0, 9], [7, 0, 0, 0, 0], [4, 0, 6, 0, 9], [3, 8, 6, 0, 9], [4, 0, 6, 0, 9]], jnp.int32)
    lawful = jnp.ones((5, 5), bool).at[4, 2].set(False)
    proposal = Proposal(drafts, None, jnp.array([4, 4, 2, 4, 4]), tree=topology(parents, 2))
    verdict = rule.verify(y, proposal, lawful)
    assert verdict.last.tolist() == [4, 0, 2, 1, 2]
    assert verdict.num_accepted.tolist() == [2, 0, 1, 1, 1]
    assert verdict.next_token[:4].tolist() == [9, 7, 6, 8]


# What comes out: plain decoding's text.

WISHES = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5},
    "seeded, filtered": {"temperature": 0.8, "seed": 6, "top_k": 30, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "min_tokens": 1},
    "seeded, penalties": {"temperature": 1.0, "seed": 7, "presence_penalty": 0.7, "logit_bias": {3: 2.0, 5: -3.0}},
    "fewer drafts": {"num_speculative_tokens": 4},
    "allowed": {"temperature": 1.0, "seed": 8, "allowed_token_ids": [3, 4, 5, 6, 7]},
}


@functools.cache
def grown(method: str):
    return new_engine(method, 4, spec={**TREE, "adaptive": False})


@cases(
    ("method", "wish"),
    list(itertools.product(["noisy", "itself", "first_layer", "reduced", "wrong"], WISHES)),
    quick=[("noisy", "seeded")],  # greedy: a tree of one level, and planted faults
    rest=[("noisy", "greedy"), ("wrong", "allowed")],
)
def test_text_is_plain_decodings(method, wish):
    listed = params(**WISHES[wish])
    served = serve(grown(method), PROMPTS, listed, bad_words=[((3, 4), (7,))] * len(PROMPTS))
    alone = serve(lively_models.engine(), PROMPTS, listed, bad_words=[((3, 4), (7,))] * len(PROMPTS))
    assert [r.error for r in served] == [None] * len(served)
    assert texts(served) == texts(alone)
    if (method, wish) in {("noisy", "greedy"), ("itself", "seeded")}:
        assert total(served)[:2] > [0, 0]


@cases("kind", ["draft_model", "eagle3", "medusa", "mlp_speculator", "dflash"], quick=["draft_model"])
@cases("width", [1, 3], quick=[3])
def test_a_tree_of_one_level(kind, width):
    spec, listed = {"tree_width": width, "tree_depth": 1}, params(**WISHES["greedy"])
    if kind == "draft_model":
        engine = new_engine("noisy", 4, spec=spec)
    else:
        engine = lively_heads.engine(kind, 4, spec=spec)
    served = serve(engine, PROMPTS, listed)
    assert [r.error for r in served] == [None] * len(served)
    assert texts(served) == texts(serve(lively_models.engine(), PROMPTS, listed))
    assert engine.metrics.num_draft_tokens == width * engine.metrics.num_drafts > 0


def test_a_config_is_built_again_of_its_own_fields():
    for options in (TREE, {"tree_choices": CHOICES}):
        config = SpeculativeConfig(model="m", **options)
        assert dataclasses.replace(config) == config
        assert dataclasses.replace(config, adaptive=False).tree_nodes == config.tree_nodes


@pytest.mark.thorough
def test_more_is_accepted_than_of_a_chain():
    """The same passes of the draft, but several candidates after each node."""
    listed = params(24, temperature=1.0, seed=9) * len(PROMPTS)
    lengths = []
    for spec in (TREE, {}):
        engine = new_engine(
            "noisy", 4 if spec else DEPTH, spec={**spec, "adaptive": False, "rejection_sample_method": "coupled"}
        )
        serve(engine, PROMPTS, listed)
        lengths.append(engine.metrics.mean_acceptance_length)
    assert lengths[0] > lengths[1] + 0.2


@pytest.mark.thorough
def test_logprobs_are_those_of_the_path():
    listed = params(12, logprobs=2)
    served, alone = (serve(e, PROMPTS[1:3], listed * 2) for e in (grown("noisy"), lively_models.engine()))
    assert total(served)[0]
    for a, b in zip(served, alone, strict=True):
        found, wanted = ([t.logprob for t in r.logprobs] for r in (a, b))
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        assert [t.top_ids for t in a.logprobs] == [t.top_ids for t in b.logprobs]


def left_where_they_were(monkeypatch):
    monkeypatch.setattr(PagedModel, "keep", lambda self, cache, kept: cache)


def where_their_slots_are(monkeypatch):
    rows = PagedModel.rows
    wrong = lambda self, positions, *rest: (
        rows(self, positions, *rest[:2], rest[2]._replace(positions=positions))
        if len(rest) > 2 and rest[2] is not None
        else rows(self, positions, *rest)
    )
    monkeypatch.setattr(PagedModel, "rows", wrong)


def they_see_all(monkeypatch):
    rows = PagedModel.rows
    wrong = lambda self, positions, *rest: (
        rows(self, positions, *rest[:2], rest[2]._replace(seen=jnp.ones_like(rest[2].seen)))
        if len(rest) > 2 and rest[2] is not None
        else rows(self, positions, *rest)
    )
    monkeypatch.setattr(PagedModel, "rows", wrong)


@cases(
    "fault",
    [left_where_they_were, where_their_slots_are, they_see_all],
    quick=[left_where_they_were],
    ids=lambda f: f.__name__,
)
def test_wrong_trees_are_seen(fault, monkeypatch):
    listed = params()
    alone = serve(lively_models.engine(), PROMPTS, listed)
    fault(monkeypatch)
    served = serve(new_engine("noisy", 4, spec={**TREE, "adaptive": False}), PROMPTS, listed)
    assert texts(served) != texts(alone)


@pytest.mark.thorough
def test_samples_prefixes_and_few_pages():
    """Rows give way and come back, samples share a prompt, prompts share pages."""
    few = new_engine("noisy", 4, spec={**TREE, "adaptive": False}, page_size=4, num_pages=34)
    listed = params(20, temperature=1.0, seed=3) * 6
    prompts = [PROMPTS[4][:i] for i in (33, 33, 25, 17, 17, 9)]
    served = serve(few, prompts, listed)
    assert few.scheduler.num_preemptions
    assert texts(served) == texts(serve(lively_models.engine(), prompts, listed))
    one = few.add(PROMPTS[3], SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=9))
    while few.busy:
        few.step()
    other = lively_models.engine().add(PROMPTS[3], SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=9))
    while lively_models.engine().busy:
        lively_models.engine().step()
    assert texts(one.samples) == texts(other.samples)


def test_adaptive_trees():
    """Whatever size is chosen from launch to launch."""
    served = serve(new_engine("wrong", 4, spec=TREE), PROMPTS, params(30, temperature=1.0, seed=2) * len(PROMPTS))
    alone = serve(lively_models.engine(), PROMPTS, params(30, temperature=1.0, seed=2) * len(PROMPTS))
    assert texts(served) == texts(alone)


@pytest.mark.thorough
def test_fixed_trees(folders, monkeypatch):  # noqa: F811
    pair, rounds = read(folders, "medusa"), recording(monkeypatch)
    served = pair.engine(4, spec={"tree_choices": CHOICES, "num_speculative_tokens": 4}, **SIZES)
    plain = tiny_models.outputs(tiny_models.engine(pair.target, **SIZES), [PROMPT], GREEDY)
    assert tiny_models.outputs(served, [PROMPT], GREEDY) == plain
    jax.effects_barrier()
    assert rounds
    for tokens, paths in rounds:
        said = up_to(states(folders("medusa")[0], tokens), len(tokens) - 1)
        ranked = np.argsort(-reference(folders("medusa"), "medusa")(said, tokens, 3)[1], axis=1, kind="stable")
        wanted = {tuple(int(ranked[i, r]) for i, r in enumerate(path)) for path in CHOICES}
        assert set(paths) == wanted


REFUSED: Sequence[tuple[dict[str, Any], str]] = [
    ({"tree_nodes": 4}, r"tree_nodes=4 must lie in 14..53 with tree_width=4 and tree_depth=4: the draft's own nodes"),
    ({"tree_nodes": 99}, r"tree_nodes=99 must lie in 14..53"),
    ({"tree_width": 0}, r"tree_width=0"),
    ({"tree_depth": 2.5}, r"tree_depth=2.5"),
    ({"tree_width": 4, "num_speculative_tokens": 7}, r"num_speculative_tokens=7, but a tree of 17 nodes has 16 drafts"),
    (
        {"tree_width": 4, "rejection_sample_method": "standard"},
        r"='standard' does not verify trees",
    ),
    ({"tree_width": 4, "method": "ngram"}, r"method='ngram' proposes no trees"),
    ({"tree_width": 4, "method": "suffix"}, r"method='suffix' proposes no trees"),
    ({"tree_width": 4, "method": "ngram+draft_model", "model": "m"}, r"'ngram\+draft_model' proposes no trees"),
    ({"tree_choices": [[0]], "tree_nodes": 4}, r"tree_choices is given, and tree_nodes=4: drop one"),
    ({"tree_choices": [[0, 0]]}, r"tree_choices has \[0, 0\], but not \[0\], its parent"),
    ({"tree_choices": [[0], [0]]}, r"each once"),
    ({"tree_choices": []}, r"at least one"),
    ({"tree_choices": "0"}, r"must be a list of paths"),
    ({"tree_choices": [[-1]]}, r"rank of tree_choices"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refusals(options, message):
    with pytest.raises(UserError, match=message):
        SpeculativeConfig(**{"model": None if options.get("method") in ("ngram", "suffix") else "m"} | options)


def test_fixed_trees_need_drafts_that_do_not_depend_on_each_other():
    with pytest.raises(UserError, match="tree_choices needs a drafter that proposes all places at once, 'draft_model'"):
        new_engine("noisy", 4, spec={"tree_choices": CHOICES})
