"""The quality of weights in 8 and 4 bits, and of pages in 8 bits: this prints the table of docs/notes/quantization.md.

It measures the embedded model and its head. Perplexity is measured on the help texts that come with Python. Acceptance
is measured on the held-out prompts of `jaxspec evaluate-draft`: greedy, four drafts a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

import checkpoints
from checkpoints.forms import quantise
from jaxspec.api.llm import LLM
from jaxspec.api.outputs import whole
from jaxspec.bench.models import english
from jaxspec.common.embedded import DRAFT, MODEL
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.inspect.fit import weight_bytes
from jaxspec.loading.quantised import HEAD, forms_of_checkpoint, quantised
from jaxspec.loading.resolved import resolved
from jaxspec.models.decoder import parameters
from jaxspec.models.model import Model
from jaxspec.options.quantization import BLOCKS, FORMS, Quantization, in_groups
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.train.evaluate import HELDOUT, read_prompts
from pallas_kernels.weights import dense
from pallas_kernels.weights.output_first import Streamed

PIECE = 512  # tokens of the text that are read together
# Blocks of 128 do not divide the 576 inputs of SmolLM2's matrices. Blocks of 64 have twice as many scales.
# Groups of 192 lose more than groups of 128.
BLOCKS_THAT_DIVIDE = {
    "int8_block": Quantization("int8", 64, 1),
    "fp8_block": Quantization("float8_e4m3fn", 64, 64),
    "int4": in_groups(192),
    "int4_asym": in_groups(192, zeros=True),
}
NONE = "none"
PAGES = {f"pages-{name}": name for name in ("int8", "fp8", "fp8_e5m2")}  # values of the option kv_cache_dtype
WITH_HEAD = ("int8+head", "fp8_dynamic+head")  # the tied table is measured as a head of its own
ROWS = (NONE, *FORMS, *WITH_HEAD, BLOCKS, *PAGES)
COLUMNS = ("form", "weights, MB", "perplexity", "acceptance length, target in this form", "head in this form")


def perplexity(llm: LLM, text: str, tokens: int) -> float:
    """Return the perplexity of the text's first tokens, read in pieces that do not see each other."""
    ids = llm.tokenizer.encode(text)[:tokens]
    pieces = [ids[i : i + PIECE] for i in range(0, len(ids), PIECE)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for output in whole(llm.generate([{"prompt_token_ids": piece} for piece in pieces], params, progress=False)):
        known = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found += [logprobs[token].logprob for token, logprobs in known]
    return math.exp(-sum(found) / len(found))


def acceptance_length(llm: LLM, messages: Sequence[str], max_tokens: int) -> float:
    """Return the mean acceptance length over greedy answers to these messages."""
    prompts = [llm.render_chat([{"role": "user", "content": text}]) for text in messages]
    metrics = SpecDecodeMetrics()
    for output in whole(llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens), progress=False)):
        metrics += output.metrics
    return metrics.mean_acceptance_length


def rounded(target: Model, form: Quantization, *, table: bool = False) -> Model:
    """Return the target with the dequantised weights of a form. table: whether its tied table is rounded, too."""

    def as_held(x: jax.Array) -> jax.Array:
        held: Any = quantise(x, form)
        return cast("jax.Array", held.rows())

    params = dict(target.params)
    for name, parameter in parameters(target.config).items():
        if parameter.is_quantised:
            params[name] = Streamed(as_held(dense(params[name])))
    if table:
        params["embed"] = as_held(params["embed"].T)
    return Model(target.config, params)


def untied(target: Model) -> Model:
    """Return the target with a copy of its tied table as the output head."""
    return Model(dataclasses.replace(target.config, tied=False), {**target.params, HEAD: target.params["embed"].T})


def in_form(target: Model, name: str) -> Model:
    """Return the target with its weights in a form. name: value of the option `quantization`."""
    whole = {where: dense(x) for where, x in target.params.items()}
    return Model(target.config, quantised(name, parameters(target.config), whole))


def speculation(form: str | None = None, pages: str = "auto") -> dict[str, object]:
    """Return the speculative config of the embedded head, with its weights and its pages in these forms."""
    how = {"quantization": form, "kv_cache_dtype": pages}
    return {"model": DRAFT, "num_speculative_tokens": 4, "adaptive": False, **how}


def rows(chosen: Sequence[str], tokens: int, max_tokens: int, prompts: int) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the table for these forms, each when it is measured.

    The target computes with a form's dequantised weights, which give the form's numbers to rounding. So its programs
    are compiled once. The head is small, and is held in the form itself. So is a target whose activations are rounded.
    """
    messages = [text for texts in read_prompts(HELDOUT).values() for text in texts[:prompts]]
    text = english()
    sizes = {"max_num_seqs": 16, "max_model_len": 1024, "num_pages": 1024}
    own = LLM(MODEL, speculative_config=speculation(), dtype="float32", **sizes)
    whole_target = own.target

    def length(target: Model, head: str | None = None) -> tuple[LLM, str]:
        own.target = target
        llm = own.speculating(speculation(head))
        return llm, f"{acceptance_length(llm, messages, max_tokens):.2f}"

    def line(name: str, form: str | None, target: Model, head: str = "") -> tuple[str, ...]:
        llm, of_target = length(target)
        size = weight_bytes(target.config, jnp.dtype("float32"), 1, form) / 1e6
        return name, f"{size:.0f}", f"{perplexity(llm, text, tokens):.2f}", of_target, head

    for name in chosen:
        if name in PAGES:
            of_head = acceptance_length(own.speculating(speculation(pages=PAGES[name])), messages, max_tokens)
            llm = LLM(MODEL, speculative_config=speculation(), dtype="float32", kv_cache_dtype=PAGES[name], **sizes)
            of_target = acceptance_length(llm, messages, max_tokens)
            size = weight_bytes(whole_target.config, jnp.dtype("float32"), 1) / 1e6
            of_text = perplexity(llm, text, tokens)
            yield f"pages in `{PAGES[name]}`", f"{size:.0f}", f"{of_text:.2f}", f"{of_target:.2f}", f"{of_head:.2f}"
            continue
        if name == BLOCKS:
            llm = LLM(MODEL, speculative_config=speculation(), dtype="float32", quantization=name, **sizes)
            forms = forms_of_checkpoint(resolved(checkpoints.resolve(MODEL)), name)
            size = weight_bytes(whole_target.config, jnp.dtype("float32"), 1, name, forms) / 1e6
            of_target = acceptance_length(llm, messages, max_tokens)
            of_text = perplexity(llm, text, tokens)
            yield f"`{name}`, the file's blocks", f"{size:.0f}", f"{of_text:.2f}", f"{of_target:.2f}", ""
            continue
        if name == NONE:
            yield line(NONE, None, whole_target)
            continue
        _, of_head = length(whole_target, name)
        if name in WITH_HEAD:
            yield line(f"`{name}`", name, in_form(untied(whole_target), name), of_head)
            continue
        form = FORMS[name]
        held = in_form(whole_target, name) if form.activations else rounded(whole_target, form)
        yield line(described(name, form), name, held, of_head)
        if form.inputs is None and form.outputs:
            yield line(f"`{name}`, and the tied table", name, rounded(whole_target, form, table=True))


def described(name: str, form: Quantization) -> str:
    """Return a form's name in the table."""
    if form.inputs is None:
        return f"`{name}`"
    return f"`{name}`, in blocks of {form.inputs}" + (f" x {form.outputs}" if form.outputs != 1 else "")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forms", nargs="*", choices=[*ROWS, []], help="default: all")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the text")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer to each prompt")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of each of the four categories")
    given = parser.parse_args()
    cast("dict[str, Quantization]", FORMS).update(BLOCKS_THAT_DIVIDE)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for row in rows(given.forms or ROWS, given.tokens, given.max_tokens, given.prompts):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
