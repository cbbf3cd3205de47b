"""Whole models of other families than Qwen3, at their published sizes, compiled by the real TPU compiler.

16 rows, contexts of 4096, and a pool as large as the engine would make it on such chips.
"""

from __future__ import annotations

from jaxspec.hardware.chips import chips
from jaxspec.inspect.fit import Wanted, fit
from tests.support import hlo
from tests.support.published_shapes import ASSISTANTS, assistant, published
from tests.support.sizes import cases
from tests.support.tpu_program import Program, check_loop

TEMPORARY = 300_000_000
# Model -> chips that hold it, number of draft tokens, and how often the program runs each layer of its assistant.
MODELS = {
    "gemma-4-e2b": ("v5e:1x1", 4, 2),  # all steps but the first are one loop's
    "gemma-4-31b": ("v5e:2x4", 4, 0),
    "muse-glimmer-30b": ("v5e:2x4", 15, 1),
    "smollm3-3b": ("v5e:1x1", 4, 0),
    "ministral-3-3b": ("v5e:1x1", 4, 0),
    "granite-3.3-8b": ("v6e:1x1", 4, 0),
    "phi-4-mini": ("v5e:1x1", 4, 0),
    "olmo-3-7b": ("v6e:1x1", 4, 0),
}


@cases("name", MODELS, rest=["gemma-4-e2b"])
def test_the_launch(name):
    """A kernel attends in every layer, also in heads of 512, and one writes the keys of each layer that has its own.
    Models without an assistant look n-grams up."""
    chip, num_drafts, passes = MODELS[name]
    target = published(name)
    draft = assistant(name, target) if name in ASSISTANTS else None
    whole = Program(chip, target, draft, num_drafts=num_drafts, max_model_len=4096)
    read = check_loop(whole, whole.launch(), TEMPORARY)
    drafting = draft.layers if draft else ()
    assert hlo.kernels(read.loop, "paged_attention") == target.num_layers + passes * len(drafting)
    cached = [layer for layer in drafting if layer in draft.cached_layers]
    assert hlo.kernels(read.loop, "kv_write") == len(target.cached_layers) + passes * len(cached)
    several = {"all-reduce", "all-gather"} if whole.placement.mesh.size > 1 else set()
    assert set(hlo.collectives(read.all)) == several
    sizes = {"num_speculative_tokens": num_drafts, "draft_tensor_parallel_size": whole.placement.mesh.size}
    said = fit(Wanted(target, draft, chips(chip), max_model_len=4096, **sizes))
    layout = whole.layouts["target"]
    assert (layout.num_pages, layout.num_window_pages) == (said.pages, said.window_pages)
    assert (layout.num_window_pages is not None) == (name == "gemma-4-31b")
