"""What the tests of LLM share: prompts, and views of what comes back."""

from __future__ import annotations

from jaxspec import LLM, SamplingParams

PROMPTS = ["The quick brown fox", "Count the words: one, two,", "dog dog dog", "def total(items):", "Über-strong"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def text_of(output) -> str:
    return output.outputs[0].text


def ids_of(output) -> list[int]:
    return output.outputs[0].token_ids


def stop_string(llm, tokens: slice, prompt: str = PROMPTS[3]) -> tuple[str, str, list[int]]:
    """(a string from inside of the greedy answer, that answer, its ids): from the middle of the first of these tokens
    to the middle of the last."""
    output = llm.generate(prompt, GREEDY)[0]
    decode = llm.tokenizer.decode
    start, end = len(decode(ids_of(output)[: tokens.start])), len(decode(ids_of(output)[: tokens.stop]))
    return text_of(output)[start:end], text_of(output), ids_of(output)


def one_shape(llm: LLM) -> LLM:
    """Its launches have one shape, whatever runs: compiling takes longest."""
    engine = llm.engine
    engine.grown_shape = lambda *requests: (engine.config.max_num_seqs, engine.catalogue.table_widths[-1])  # type: ignore
    return llm


def assert_idle(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.allocator.num_free == llm.engine.num_pages
