"""Poisoned requests among good ones: each good one gets what it would get alone, each poisoned one a line that says
what is wrong, every page comes back, and it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import LLM, AsyncLLM, SamplingParams
from jaxspec.api.outputs import RequestOutput
from jaxspec.decode.state import Variant
from jaxspec.verify import rules
from tests.drafters.references import dflash, eagle, eagle3, medusa, mlp, mtp, pard
from tests.drafters.references.common import Shape
from tests.support.model_folders import write_model
from tests.support.sizes import cases

EVERYTHING = Variant(
    frozenset({rules.UNSEEDED, rules.SEEDED}), filters=True, logprobs=5, processors=True, long_lists=True
)
OPTIONS = {"max_num_seqs": 6, "num_pages": 40, "page_size": 4, "max_model_len": 64, "prefill_chunk": 16}
K = 3
TARGET = Shape(vocab_size=320, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48, layers=2)
# Heads, as their references write them beside the model below.
HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle": (eagle, {}),
    "eagle3": (eagle3, {"layer_ids": (0, 1, 2)}),
    "p-eagle": (eagle3, {"layer_ids": (0, 1, 2), "mask_token_id": 5}),
    "mtp": (mtp, {"kind": "deepseek"}),
    "medusa": (medusa, {}),
    "mlp_speculator": (mlp, {}),
    "dflash": (dflash, {"layer_ids": (0, 1)}),
    "pard": (pard, {}),
}
METHODS = ("ngram", *HEADS)
NO_NUMBER = 77  # an id whose row of the table is no number
NAN = float("nan")
ABSURD = (
    NAN,
    float("inf"),
    -1,
    0,
    2**31,
    2**63,
    2**64,
    10**30,
    1e39,
    1e-38,
    1.5,
    "7",
    "",
    None,
    b"7",
    (),
    [NAN],
    {},
    True,
)
# What SamplingParams does not let through, given to it and, past it, to the engine.
POISONS: tuple[dict[str, Any], ...] = (
    {"top_k": 2**31},
    {"top_k": NAN},
    {"min_tokens": 2**31},
    {"seed": 1.5},
    {"seed": "7"},
    {"logprobs": 2.5},
    {"num_speculative_tokens": 1.5},
    {"max_tokens": 20.5},
    {"temperature": NAN},
    {"temperature": 1e39},
    {"top_p": NAN},
    {"repetition_penalty": 1e-38},
    {"repetition_penalty": NAN},
    {"stop_token_ids": (2**31,)},
    {"stop_token_ids": (1.5,)},
    {"logit_bias": ((5, NAN),)},
    {"logit_bias": ((2**40, 1.0),)},
    {"allowed_token_ids": (2**40,)},
    {"prompt_logprobs": NAN},
    {"bad_words": (5,)},
    {"stop": (5,)},
)
PROMPTS = ([], [2**40], [400], [-1], [1.5], b"abc", None, [5] * 64, {"prompt_token_ids": "abc"}, [5, NO_NUMBER, 9])


@dataclasses.dataclass
class Case:
    """A request.

    params: options of SamplingParams.
    past: options that get past its check.
    fails: what of it raises while it is decoded: "stop" (its stop callback) or None.
    """

    prompt: Any
    params: dict[str, Any]
    past: dict[str, Any] = dataclasses.field(default_factory=dict)
    fails: str | None = None
    good: bool = True

    def sampling(self) -> SamplingParams:
        params = SamplingParams(**self.params)
        for name, value in self.past.items():
            object.__setattr__(params, name, value)
        return params


def draw(rng: np.random.Generator, count: int) -> list[Case]:
    """Every fifth is poisoned."""
    return [poisoned(rng, i // 5) if i % 5 == 4 else good(rng) for i in range(count)]


def good(rng: np.random.Generator) -> Case:
    prompt = [int(i) for i in rng.integers(5, NO_NUMBER, 1 + rng.integers(20))]
    params: dict[str, Any] = {"max_tokens": 1 + int(rng.integers(12)), "temperature": 0.0}
    # Ids below the poisoned one, so that nobody says it by chance.
    params |= {"allowed_token_ids": tuple(range(NO_NUMBER)), "ignore_eos": bool(rng.random() < 0.8)}
    if rng.random() < 0.6:
        params |= {"temperature": float(rng.uniform(0.4, 1.5)), "seed": int(rng.integers(1 << 60))}
        params |= [{}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.1}][rng.integers(4)]
    return Case(prompt, params | [{}, {"logprobs": 2}, {"n": 2}, {"repetition_penalty": 1.3}][rng.integers(4)])


def poisoned(rng: np.random.Generator, index: int) -> Case:
    case = good(rng)
    case.good = False
    kind = index % 5
    if kind == 0:
        case.params |= POISONS[index // 5 % len(POISONS)]
    elif kind == 1:
        case.past = POISONS[index // 5 % len(POISONS)]
    elif kind == 2:
        case.prompt = PROMPTS[index // 5 % len(PROMPTS)]
    elif kind == 3:  # some mutation of a good one, with or without the check
        names = [field.name for field in dataclasses.fields(SamplingParams)]
        mutation = {names[rng.integers(len(names))]: ABSURD[rng.integers(len(ABSURD))]}
        if rng.random() < 0.5:
            case.params |= mutation
        else:
            case.past = mutation
    else:
        case.fails = "stop"
    return case


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("poisoned") / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][NO_NUMBER] = NAN
    save_file(tensors, path / "model.safetensors")
    return path


def drafting(folder: Path, method: str) -> tuple[str, dict[str, Any]]:
    """(the model, speculative_config) for one of METHODS."""
    if method == "ngram":
        return str(folder), {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1}
    (reference, options), head = HEADS[method], folder.parent / method
    reference.write(head, seed=0, target=TARGET, **options)
    if reference is not mtp:
        return str(folder), {"model": str(head), "num_speculative_tokens": K, "adaptive": False}
    both = shutil.copytree(folder, folder.parent / "with heads", dirs_exist_ok=True)  # in the target's own checkpoint
    tensors = load_file(folder / "model.safetensors") | load_file(head / "model.safetensors")
    save_file(tensors, both / "model.safetensors")
    return str(both), {"method": "mtp", "num_speculative_tokens": K, "adaptive": False}


def quick(llm: LLM) -> LLM:
    """One program serves all: compiling takes longest."""
    llm.engine.catalogue.variants.choose = lambda program, exact: EVERYTHING  # type: ignore[method-assign]
    llm.engine.grown_shape = lambda *requests: (8, 16)  # type: ignore[method-assign]
    return llm


@pytest.fixture(scope="module")
def alone(folder):
    """What a good case gets: alone, plainly, the other rows empty."""
    llm, known = quick(LLM(str(folder), **OPTIONS | {"num_pages": 96, "enable_prefix_caching": False})), {}

    def serve(case: Case) -> list[tuple]:
        key = str(case)
        if key not in known:
            (output,) = llm.generate([case.prompt], case.sampling(), progress=False)
            known[key] = told(output)
        return known[key]

    return serve


def told(output: RequestOutput) -> list[tuple]:
    return [(c.token_ids, c.text, c.finish_reason, c.error) for c in output.outputs]


def fail(output: list[int], known: int) -> int | None:
    raise LookupError("no such text")


def check(cases: list[Case], results: list[RequestOutput | Exception], alone) -> None:
    refused = failed = 0
    for case, result in zip(cases, results, strict=True):
        if case.good:
            assert isinstance(result, RequestOutput), (case, result)
            assert told(result) == alone(case), case
        elif isinstance(result, Exception):
            assert isinstance(result, ValueError) or case.past, (case, result)  # who gets past the check, by anything
            assert str(result), case
            assert "\n" not in str(result), case
            refused += 1
        else:
            for completion in result.outputs:
                assert completion.finish_reason in ("stop", "length", "error"), case
                assert (completion.finish_reason == "error") == bool(completion.error), case
                assert "\n" not in (completion.error or ""), case
                failed += bool(completion.error)
            assert not case.fails or result.outputs[0].error == "LookupError: no such text", case
    assert refused > len(cases) / 25
    assert failed > len(cases) / 25


def check_free(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.busy
    assert engine.scheduler.allocator.num_free == engine.num_pages
    assert not any(engine.scheduler.allocator.references)
    assert not engine.open_requests.midway


@cases("method", METHODS, rest=[METHODS[4]])
def test_through_llm(method, folder, alone):
    """Requests come between steps, as from several iterators."""
    model, speculation = drafting(folder, method)
    rng = np.random.default_rng(METHODS.index(method))
    llm = quick(LLM(model, speculative_config=speculation, **OPTIONS))
    cases = draw(rng, 150)
    results: list[Any] = [None] * len(cases)
    prompt_runs: dict[int, Any] = {}
    coming, steps = iter(enumerate(cases)), 0
    while (case := next(coming, None)) is not None or prompt_runs:
        if case is not None:
            index, wanted = case
            try:
                (ask,) = llm._prepare(wanted.prompt, wanted.sampling())
                prompt_runs[index] = llm._submit(ask)
            except Exception as error:
                results[index] = error
            else:
                for request in prompt_runs[index].requests if wanted.fails else ():
                    request.find_stop = fail
        if case is None or len(prompt_runs) > 8:
            llm._step()
            steps += 1
        for index, prompt_run in [(i, prompt_run) for i, prompt_run in prompt_runs.items() if prompt_run.ended]:
            results[index] = prompt_runs.pop(index).output()
            llm._abort(prompt_run)
        assert steps < 5000, "it does not end"
    check(cases, results, alone)
    check_free(llm)


@pytest.mark.thorough
def test_through_async_llm(folder, alone):
    rng = np.random.default_rng(1)
    model, speculation = drafting(folder, str(rng.choice(METHODS)))
    cases = draw(rng, 200)

    async def ask(llm: AsyncLLM, case: Case, room: asyncio.Semaphore) -> Any:
        async with room:
            try:
                params = case.sampling()
                if not case.fails:
                    return await llm.generate(case.prompt, params)
                return await llm.generate(case.prompt, dataclasses.replace(params, stop=("\0",)))
            except Exception as error:
                return error

    async def main() -> list[Any]:
        async with AsyncLLM(model, speculative_config=speculation, **OPTIONS) as llm:
            quick(llm.llm)
            submit = llm.llm._submit

            def submitted(wanted):  # in the engine's thread, before the first step
                prompt_run = submit(wanted)
                for request in prompt_run.requests if "\0" in wanted.params.stop else ():
                    request.find_stop = fail
                return prompt_run

            llm.llm._submit = submitted  # type: ignore[method-assign]
            room = asyncio.Semaphore(10)
            results = await asyncio.gather(*(ask(llm, case, room) for case in cases))
            until = time.monotonic() + 300
            while llm._thread.calls and time.monotonic() < until:
                await asyncio.sleep(0.01)
            check_free(llm.llm)
            assert llm._thread.is_alive()
            return results

    check(cases, asyncio.run(asyncio.wait_for(main(), 900)), alone)
