"""The model class of lm-eval: scores of a local task equal transformers' on the same weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxspec import UserError
from tests.support.model_folders import write_model

pytest.importorskip("lm_eval")
harness = pytest.importorskip("jaxspec.bench.harness")
pytestmark = pytest.mark.filterwarnings("default")  # those of other packages

OPTIONS = {"max_num_seqs": 4, "num_pages": 64, "rounds_per_launch": 4}
TEXTS = ["The quick brown fox jumps", "dog dog", "Count the words: one, two, three, four"]
PAIRS = [("The quick", " brown fox"), ("", "One, two"), ("Count the words: ", "one"), ("x" * 700, " dog")]


@dataclasses.dataclass
class Asked:
    """Stand in for an Instance of lm-eval, which has arguments."""

    args: tuple


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="module")
def model(folder):
    return harness.HarnessLM(folder, speculative_config={"method": "ngram"}, **OPTIONS)


@pytest.fixture(scope="module")
def scores(folder):
    """Return the function that scores (context, continuation) by transformers, as (log-probability, greedy)."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def score(context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = context + continuation
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
        places = np.arange(len(context) - 1, len(ids) - 1)
        return float(logits[places, continuation].sum()), bool((logits[places].argmax(-1) == continuation).all())

    return score


@pytest.mark.oracle
def test_log_likelihoods_equal_transformers(model, scores):
    asked = [Asked(pair) for pair in PAIRS]
    found = model.loglikelihood(asked, disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(PAIRS, found, strict=True):
        ids, pair = [model.prefix_token_id], model.tok_encode(continuation, False)
        if context:
            ids, pair = model._encode_pair(context, continuation)
        expected = scores(ids[-(model.max_length - len(pair)) :], pair)
        assert (score, greedy) == (pytest.approx(expected[0], rel=1e-4), expected[1])
    greedy = model.llm.generate(TEXTS[0], harness.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0]
    ids = greedy.outputs[0].token_ids
    ((_, is_greedy),) = model._loglikelihood_tokens([(None, list(greedy.prompt_token_ids), ids)], disable_tqdm=True)
    assert is_greedy


@pytest.mark.oracle
def test_rolling_log_likelihoods_equal_transformers(model, scores):
    found = model.loglikelihood_rolling([Asked((text,)) for text in TEXTS], disable_tqdm=True)
    for text, score in zip(TEXTS, found, strict=True):
        assert score == pytest.approx(scores([model.prefix_token_id], model.tok_encode(text))[0], rel=1e-4)
    (long,) = model.loglikelihood_rolling([Asked(("dog " * 700,))], disable_tqdm=True)
    assert np.isfinite(long)


def test_outputs_end_before_their_stop_strings(model):
    keywords = {"until": ["e"], "max_gen_toks": 24, "do_sample": False}
    found = model.generate_until([Asked((text, keywords)) for text in TEXTS], disable_tqdm=True)
    free = model.generate_until([Asked((text, keywords | {"until": []})) for text in TEXTS], disable_tqdm=True)
    assert found == [text.split("e")[0] for text in free]
    with pytest.raises(UserError, match="generation keyword 'num_beams' is not supported: use until"):
        model.generate_until([Asked(("x", {"num_beams": 2}))])
    with pytest.raises(UserError, match="max_gen_toks=512 leaves no room for a prompt in 512 tokens"):
        model.generate_until([Asked(("x", {"max_new_tokens": 512}))])
    assert harness.sampling_params({"temperature": 0.5}, 9).temperature == 0.5
    assert harness.sampling_params({"temperature": 0.5, "do_sample": False}, 9).temperature == 0


def test_a_local_task_runs(model, tmp_path):
    """lm-eval itself finds the class by its name, and scores choices and texts."""
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import get_model

    assert get_model("jaxspec") is harness.HarnessLM
    (tmp_path / "data.jsonl").write_text('{"q": "The quick", "a": " brown fox", "b": " dog dog"}\n' * 2)
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{[a, b]}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    found = simple_evaluate(model, tasks=[task], bootstrap_iters=0)
    good, bad = (
        model.loglikelihood([Asked(("The quick", x))], disable_tqdm=True)[0][0] for x in (" brown fox", " dog dog")
    )
    assert found["results"]["local"]["acc,none"] == float(good > bad)
