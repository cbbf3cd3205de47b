"""The references propose what the packages do in which the drafters are published."""

from __future__ import annotations

import numpy as np
import pytest

from tests.drafters.references import dflash, dspark, eagle, eagle3, medusa, mlp, mtp, pard
from tests.drafters.references.common import Shape, random_features
from tests.golden.make_drafters import CASES, FOLDER, K, inputs

PROPOSALS = {
    "eagle": eagle.proposals,
    "eagle3": eagle3.proposals,
    "peagle": eagle3.parallel_proposals,
    "mtp": mtp.proposals,
    "dflash": dflash.proposals,
    "dspark": dspark.proposals,
}


@pytest.mark.parametrize(("family", "case"), [(family, case) for family in CASES for case in CASES[family]])
def test_golden_proposals(family, case, tmp_path):
    tokens, features = inputs(family, case, tmp_path)
    ids, logits = PROPOSALS[family](tmp_path, features, tokens, K)
    with np.load(FOLDER / f"{family}.npz") as golden:
        expected = golden[f"{case}.logits"]
        assert ids.tolist() == golden[f"{case}.ids"].tolist()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-6 * np.abs(expected).max())  # float32's rounding


UNEVEN = Shape(width=24, heads=6, head_dim=10)  # a head size apart from width / heads
VARIANTS = [
    (eagle, {"rope_theta": False}),
    (eagle, {"embed": True}),
    (eagle3, {"draft_vocab_size": None}),
    (eagle3, {"width": 20}),
    (eagle3, {"first_layer": "layers.0."}),
    (eagle3, {"nested": True, "layer_ids": (1, 3, 6), "norm_before_fc": True}),
    (medusa, {}),
    (medusa, {"layers": 2, "own_head": False}),
    (medusa, {"vllm": True, "bias": False}),
    (mlp, {}),
    (mlp, {"tied": True, "scaled": True}),
    (mlp, {"tied": None, "scaled": None, "inner_said": False}),
    (mtp, {"kind": "deepseek", "head": True}),
    (dflash, {"speculators": True}),
    (dspark, {}),
    (dspark, {"kind": "gated"}),
    (dspark, {"rank": None}),
    (pard, {}),
]


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_published_forms(family, options, tmp_path):
    """Each is written and read, and a draft does not depend on how many follow it."""
    tokens, features = random_features(UNEVEN, 7, 0)
    lent = {"embed": features.embed, "head": features.head}
    options = {name: lent[name] if value is True and name in lent else value for name, value in options.items()}
    family.write(tmp_path, seed=1, target=UNEVEN, **options)
    ids, logits = family.proposals(tmp_path, features, tokens, K)
    assert ids.shape == (K,)
    assert logits.shape[0] == K
    assert np.isfinite(logits).all()
    assert 0 <= ids.min() <= ids.max() < UNEVEN.vocab_size
    if family not in (dflash, dspark):  # whose masks see each other
        assert family.proposals(tmp_path, features, tokens, 1)[0][0] == ids[0]


def test_forms_of_one_drafter(tmp_path):
    """The same weights under other names, and options that change nothing, propose the same."""
    tokens, features = random_features(UNEVEN, 7, 0)
    said = {"layer_ids": (1, 3, 6), "norm_before_fc": True}
    for family, same in (
        (eagle3, [said, said | {"nested": True}, said | {"speculators": True}]),
        (eagle3, [{}, {"first_layer": "layers.0."}, {"nested": True}, {"speculators": True}, {"layer_ids": (2, 4, 5)}]),
        (eagle, [{}, {"bias": True}, {"embed": features.embed}, {"rope_theta": False}]),
        (medusa, [{}, {"vllm": True}, {"said_heads": None}]),
        (mlp, [{}, {"tied": None}, {"scaled": None}]),
        (mtp, [{"kind": "deepseek"}, {"kind": "deepseek", "head": features.head}]),
    ):
        found = []
        for options in same:
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            family.write(folder, seed=1, target=UNEVEN, **options)
            found.append(family.proposals(folder, features, tokens, K)[1])
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])
