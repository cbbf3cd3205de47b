"""The device program compiled by the real TPU compiler, for chips that are not there: every variant, few layers."""

from __future__ import annotations

import dataclasses

import pytest

from jaxspec.bench.presets import preset
from jaxspec.decode.state import Variant
from jaxspec.models.config import ModelConfig
from jaxspec.verify import rules
from tests.support import hlo
from tests.support.sizes import cases
from tests.support.tpu_program import Program, check, check_loop, first_layers

K, ROWS = 4, 8
# Pages of a layer would fit into VMEM, and nothing else has their number of elements.
SMALL = {"max_num_seqs": ROWS, "max_model_len": 1024, "num_pages": 500}


def layers(name: str, count: int, **fields) -> ModelConfig:
    return dataclasses.replace(first_layers(preset(name), count), **fields)


QWEN = layers("qwen3-0.6b", 1)
# A round's logits in float32, of which a few copies live at a time: more where rows sample.
LOGITS = ROWS * (K + 1) * QWEN.vocab_size * 4
VARIANTS = {
    "ngram": ("v5e:1x1", layers("qwen3-0.6b", 2), None, Variant(), K, 2 * LOGITS),
    "draft_model": ("v5e:1x1", layers("qwen3-0.6b", 2), QWEN, Variant(), K, 2 * LOGITS),
    "reduced vocabulary": (
        "v5e:1x1",
        QWEN,
        dataclasses.replace(
            QWEN, tied=False, reduced_vocab_size=32768, rare_vocab_size=16384, rare_width=256, embed_width=2048
        ),
        Variant(),
        K,
        2 * LOGITS,
    ),
    # Noise over the whole vocabulary, once a draft token, is what takes long to compile: one draft.
    "sampling": ("v6e:1x1", QWEN, QWEN, Variant(frozenset({rules.UNSEEDED})), 1, 8 * LOGITS),
    # Once a launch an embedding is copied whose width, 576, does not fill the lanes.
    "heads of 64": ("v5e:1x1", layers("smollm2-135m", 1), layers("llama-3.2-1b", 1), Variant(), 2, 3 * LOGITS),
    "heads of 256": ("v6e:1x1", layers("qwen3-0.6b", 1, head_dim=256), QWEN, Variant(), 2, 2 * LOGITS),
}


@cases("name", VARIANTS, quick=["draft_model"])
def test_the_launch(name, tmp_path):
    chip, target, draft, variant, num_drafts, temporary = VARIANTS[name]
    program = Program(chip, target, draft, variant, num_drafts=num_drafts, **SMALL)
    program.kept = tmp_path if name in ("draft_model", "sampling") else None
    read = check_loop(program, program.launch(), temporary)
    # All draft passes but the first are one loop's.
    passes = target.num_layers + (min(num_drafts, 2) * draft.num_layers if draft else 0)
    for kernel in ("kv_write", "paged_attention"):
        assert hlo.kernels(read.loop, kernel) == hlo.kernels(read.all, kernel) == passes


@pytest.mark.thorough
def test_prefill():
    program = Program("v5e:1x1", layers("qwen3-0.6b", 2), QWEN, **SMALL)
    read = check(program, program.prefill(), 200_000_000)
    assert hlo.kernels(read.all, "kv_write") == 2
    # Nobody reads what the last layer attends to: prefill never samples.
    assert hlo.kernels(read.all, "paged_attention") == 1


@cases("form", ["int8", "fp8"], rest=["int8"])
def test_pages_in_8_bits(form):
    """Kernels write and read them in place, in the launch over a tree and in prefill."""
    sizes = SMALL | {"kv_cache_dtype": form, "draft_kv_cache_dtype": form}
    program = Program("v5e:1x1", QWEN, QWEN, tree={"tree_width": 2, "tree_depth": 2, "tree_nodes": 5}, **sizes)
    for read in (check_loop(program, program.launch(), 3 * LOGITS), check(program, program.prefill(), 200_000_000)):
        written = hlo.kernels(read.all, "kv_write")
        assert hlo.kernels(read.all, "scale_write") == written > 0


@cases("form", ["int8", "fp8", "fp8_tensor"], rest=["int8"])
def test_no_weight_is_dequantised_in_memory(form):
    """The launch needs no more temporary memory than one in bfloat16, with target and draft in 8 bits."""
    program = Program("v5e:1x1", QWEN, QWEN, num_drafts=2, forms={"target": form, "draft": form}, **SMALL)
    read = check_loop(program, program.launch(), 2 * LOGITS)
    assert not hlo.made(read.all, program.weights, prefetched=True), "weights are copied once a launch"
