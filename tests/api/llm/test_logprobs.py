"""Log-probabilities against one pass over all tokens."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec import SamplingParams
from tests.api.llm.answers import PROMPTS, ids_of, stop_string
from tests.support.sizes import cases


def table_of(llm, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [T, V] of what follows each token, from one pass over all of them."""
    import jax

    from tests.models.forward import run

    logits = run(
        llm.engine.runner.decoding.target.config, llm.engine.runner.params["target"], np.array([tokens]), [len(tokens)]
    )
    return np.asarray(jax.nn.log_softmax(logits[0]))


def check_logprobs(llm, entries, ids: list[int], table: np.ndarray, most: int, text: str) -> None:
    assert len(entries) == len(ids)
    said = [entry[i] for entry, i in zip(entries, ids, strict=True)]
    assert "".join(found.decoded_token for found in said if found.token_bytes is not None) == text
    assert b"".join(bytes(found.token_bytes or ()) for found in said).decode(errors="replace") == text
    for entry, chosen, row in zip(entries, ids, table, strict=True):
        assert next(iter(entry)) == chosen
        best = np.argsort(-row, kind="stable")[:most].tolist()
        assert set(entry) == {chosen, *best}
        for i, found in entry.items():
            assert found.logprob == pytest.approx(row[i], abs=1e-4)
            assert found.rank == 1 + int(np.sum(row > row[i]))
            assert i == chosen or found.decoded_token == llm.tokenizer.decode([i])


@cases("temperature", [0.0, 1.5], quick=[0.0])
def test_logprobs_are_those_of_the_targets_raw_logits(llm, temperature):
    """Whatever the temperature and the filters, of accepted drafts and of the target's own tokens."""
    params = SamplingParams(
        n=2, temperature=temperature, top_k=20, seed=1, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=1
    )
    output = llm.generate(PROMPTS[1], params)[0]
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        table = table_of(llm, prompt + completion.token_ids)[len(prompt) - 1 : -1]
        check_logprobs(llm, completion.logprobs, completion.token_ids, table, 3, completion.text)
        chosen = [entry[i].logprob for i, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs[0] is None
    text = llm.tokenizer.decode(prompt[1:])
    check_logprobs(llm, output.prompt_logprobs[1:], prompt[1:], table_of(llm, prompt)[:-1], 1, text)


def test_logprobs_of_the_chosen_token_alone_and_of_none(llm):
    short = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    alone = llm.generate(PROMPTS[0], SamplingParams(**short, logprobs=0))[0]
    assert [list(entry) for entry in alone.outputs[0].logprobs] == [[i] for i in ids_of(alone)]
    assert alone.prompt_logprobs is None
    none = llm.generate(PROMPTS[0], SamplingParams(**short))[0]
    assert (none.outputs[0].logprobs, none.outputs[0].cumulative_logprob) == (None, None)


def test_logprobs_end_with_the_stop_string(llm):
    stop, _, _ = stop_string(llm, slice(6, 8))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=stop, logprobs=1)
    output = llm.generate(PROMPTS[3], params)[0]
    assert 0 < len(ids_of(output)) < 24
    assert [next(iter(entry)) for entry in output.outputs[0].logprobs] == ids_of(output)


def test_a_prompt_is_scored_without_output(llm):
    params = SamplingParams(n=2, max_tokens=0, prompt_logprobs=1, logprobs=1)
    output = llm.generate(PROMPTS[1], params)[0]
    (wanted,) = llm.generate(PROMPTS[1], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert [(o.text, o.token_ids, o.finish_reason, o.logprobs) for o in output.outputs] == [("", [], "length", [])] * 2
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs == wanted.prompt_logprobs
    assert output.timing.time_to_first_token is None


def test_the_first_pieces_of_a_stream_have_those_of_the_prompt(llm):
    params = SamplingParams(n=2, max_tokens=6, prompt_logprobs=1, ignore_eos=True, seed=1)
    (wanted,) = llm.generate(PROMPTS[1], params)
    for longest in (6, 0):
        pieces = list(llm.stream(PROMPTS[1], SamplingParams(**vars(params) | {"max_tokens": longest})))
        for sample in range(2):
            first, *others = [piece for piece in pieces if piece.sample == sample]
            assert first.prompt_logprobs == wanted.prompt_logprobs
            assert {piece.prompt_logprobs for piece in others} <= {None}
