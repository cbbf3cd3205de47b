"""Whole models, every layer, compiled by the real TPU compiler for chips that are not there.

16 rows, contexts of 4096, and a pool as large as the engine would make it on such a chip.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from jaxspec.bench.presets import preset
from jaxspec.hardware.chips import chips
from jaxspec.inspect.fit import Wanted, fit
from tests.support import hlo
from tests.support.sizes import cases
from tests.support.tpu_program import Program, check, check_loop, first_layers

pytestmark = pytest.mark.thorough

K, TEMPORARY = 4, 300_000_000
PAIRS = {
    "v5e:1x1": ("qwen3-1.7b", "qwen3-0.6b"),
    "v6e:1x1": ("qwen3-8b", "qwen3-0.6b"),
    "v5e:2x2": ("qwen3-8b", "qwen3-0.6b"),
}


def program(chip: str, num_layers: int | None = None) -> Program:
    target, draft = (first_layers(preset(name), num_layers) for name in PAIRS[chip])
    return Program(chip, target, draft, num_drafts=K, max_model_len=4096)


def layer_passes(whole: Program, draft_passes: int) -> int:
    target, draft = (model.config.num_layers for model in whole.models.values())
    return target + draft_passes * draft


def sums(layer_passes: int, passes: int) -> int:
    """All-reduces: attention's and the MLP's second product of each layer, and the embedding of each pass."""
    return 2 * layer_passes + passes


@cases("chip", PAIRS, rest=["v5e:1x1", "v5e:2x2"])
def test_the_launch(chip):
    whole = program(chip, num_layers=12 if chip == "v5e:2x2" else None)  # whole models on more chips are below
    read = check_loop(whole, whole.launch(), TEMPORARY)
    drafts = min(K, 2)  # all but the first are one loop's
    layers = layer_passes(whole, drafts)
    for kernel in ("kv_write", "paged_attention"):
        assert hlo.kernels(read.loop, kernel) == hlo.kernels(read.all, kernel) == layers
    # Of what is split, nothing but each pass's logits is ever put together.
    several = {"all-reduce": sums(layers, 1 + drafts), "all-gather": 1 + drafts}
    assert hlo.collectives(read.all) == Counter(several if whole.placement.mesh.size > 1 else {})
    assert not set(hlo.collectives(set(read.all) - set(read.loop)))


@cases("chip", PAIRS, rest=["v5e:1x1", "v5e:2x2"])
def test_prefill(chip):
    """Its activations, of 16 rows of 256 tokens, are what the engine reserves memory for."""
    several = chip == "v5e:2x2"
    whole = program(chip, num_layers=2 if several else None)  # all of them take minutes and show no more
    read = check(whole, whole.prefill(), whole.reserved)
    layers = whole.models["target"].config.num_layers
    assert hlo.kernels(read.all, "kv_write") == layers
    # Nobody reads what the last layer attends to, nor its MLP.
    assert hlo.kernels(read.all, "paged_attention") == layers - 1
    assert hlo.collectives(read.all) == Counter({"all-reduce": sums(layers - 1, 1)} if several else {})


SEVERAL = ["v5e:2x4", "v5e:4x4", "v5p:2x2x2"]


@cases("chip", SEVERAL, rest=["v5e:4x4"])
def test_a_draft_that_is_whole_on_every_chip(chip):
    """Eight chips, or sixteen of four hosts, which have copies of key-value heads: a round pays for the target's sums,
    and the draft for none. It fits, with the pages that there is room for."""
    # All layers on one of them: eight of each show the same in a fifth of the time.
    num_layers = None if chip == SEVERAL[0] else 8
    target, draft = (first_layers(preset(name), num_layers) for name in ("qwen3-32b", "qwen3-0.6b"))
    whole = Program(chip, target, draft, num_drafts=K, draft_degree=1, max_model_len=4096)
    compiled = whole.launch()
    read = check_loop(whole, compiled, TEMPORARY)
    said, memory = fit(Wanted(target, draft, chips(chip), max_model_len=4096)), compiled.memory_analysis()
    weights = memory.argument_size_in_bytes - memory.alias_size_in_bytes  # and some words of the batch
    assert weights == pytest.approx(said.target_weights + said.draft_weights, rel=0.001)
    a_page = said.target_page + said.draft_page
    assert memory.alias_size_in_bytes == whole.layouts["target"].num_pages * a_page
    assert hlo.collectives(read.all) == Counter({"all-reduce": sums(target.num_layers, 1), "all-gather": 1})
    assert not [i for i in read.all if hlo.collectives([i]) and "/propose/" in i.line]
    read = check(whole, whole.prefill(), whole.reserved)
    assert hlo.collectives(read.all) == Counter({"all-reduce": sums(target.num_layers - 1, 1)})


@cases("chip", ["v6e:1x1", "v5e:2x2"], rest=["v5e:2x2"])
@pytest.mark.parametrize(("method", "num_drafts"), [("eagle3", K), ("dflash", 15)])
def test_a_head_beside_its_target(method, num_drafts, chip):
    """The loop holds the target's features too, in place like the caches. Of what is split, only those of each round,
    and logits, are ever put together."""
    target = preset("qwen3-8b")
    head = preset(method, target)
    whole = Program(chip, target, head, num_drafts=num_drafts, max_model_len=4096)
    assert len(whole.cache.features) == 1
    # 32,000 ids in four parts are no whole lanes: that head is turned once a launch, into VMEM, which it leaves while
    # the target takes that.
    size = whole.placement.mesh.size
    turned = head.width * head.head_size // size if head.head_size % (128 * size) else 0
    # Where its devices put logits together, those of 16 positions a row take 156 MB, twice.
    compiled = whole.launch()
    read = check_loop(whole, compiled, TEMPORARY if num_drafts == K else 500_000_000, but=turned)
    found, passes = hlo.collectives(read.all), 1 + (2 if num_drafts == K else 1)
    if whole.placement.mesh.size > 1:
        assert set(found) == {"all-reduce", "all-gather"}
        assert found["all-gather"] <= 1 + passes
    else:
        assert not found


@cases("chip", ["v6e:1x1", "v5e:2x2"], rest=["v5e:2x2"])
def test_a_tree(chip):
    """The accepted path is moved in place, in every layer and among the features. A third of the layers show it."""
    target = first_layers(preset("qwen3-8b"), 12)
    head = preset("eagle3", target)
    tree = {"tree_width": 4, "tree_depth": 4, "tree_nodes": 17}
    whole = Program(chip, target, head, tree=tree, max_model_len=4096)
    size = whole.placement.mesh.size
    turned = head.width * head.head_size // size if head.head_size % (128 * size) else 0
    read = check_loop(whole, whole.launch(), 600_000_000, but=turned)
    layers = target.num_layers
    assert hlo.kernels(read.loop, "kv_write") >= 2 * layers  # once what the pass makes, once what is moved
    assert hlo.kernels(read.loop, "paged_attention") >= layers + 2


# Form, chips, target, its layers that are compiled, draft, rows, length of each, form of the pages, the least number of
# context tokens that fits beside all layers.
QUANTISED = {
    "one chip": ("int8", "v5e:1x1", "qwen3-8b", None, "eagle3", 16, 4096, "auto", 24_000),
    "pages in int8": ("int8", "v5e:1x1", "qwen3-8b", None, "eagle3", 16, 4096, "int8", 45_000),
    "four chips": ("int8", "v5e:2x2", "qwen3-32b", None, "eagle3", 16, 4096, "auto", 40_000),
    "colab/quickstart.py": ("int8", "v5e:1x1", "qwen3-8b", None, "qwen3-0.6b", 4, 512, "auto", 4 * 512),
    # A product of a matrix in groups takes many instructions, and long to compile.
    "int4, one chip": ("int4", "v5e:1x1", "qwen3-8b", 3, "eagle3", 16, 4096, "auto", 45_000),
    "int4, four chips": ("int4", "v5e:2x2", "qwen3-32b", 2, "eagle3", 16, 4096, "auto", 100_000),
}


@cases("name", QUANTISED, rest=["four chips", "colab/quickstart.py", "int4, one chip"])
def test_quantised_weights(name):
    """They fit as `jaxspec info --chips` says, and none is dequantised in memory."""
    form, chip, target, layers, draft, rows, length, cache, least = QUANTISED[name]
    all_layers = preset(target)
    target = first_layers(all_layers, layers)
    draft = preset(draft, target)
    sizes = {"max_num_seqs": rows, "max_model_len": length, "kv_cache_dtype": cache, "draft_kv_cache_dtype": cache}
    forms = {"target": form, "draft": None if name.endswith(".py") else form}
    whole = Program(chip, target, draft, num_drafts=K, draft_degree=1, forms=forms, **sizes)
    compiled = whole.launch()
    check_loop(whole, compiled, TEMPORARY)
    asked = Wanted(target, draft, chips(chip), quantization=form, draft_quantization=forms["draft"], **sizes)
    said = fit(asked)
    memory = compiled.memory_analysis()
    weights = memory.argument_size_in_bytes - memory.alias_size_in_bytes  # and some words of the batch
    assert weights == pytest.approx(said.target_weights + said.draft_weights, rel=0.001)
    assert whole.layouts["target"].num_pages == said.pages
    assert memory.alias_size_in_bytes == said.pages * (said.target_page + said.draft_page + said.features_page)
    assert fit(dataclasses.replace(asked, target=all_layers)).tokens >= least
