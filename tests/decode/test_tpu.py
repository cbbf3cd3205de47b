"""The device program compiled by the real TPU compiler, for chips that are not there.

Every variant compiles with few layers; the full depth of a Qwen3-0.6B-shaped target once.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxspec.cache.pages import CacheLayout, PagedKVCache, cache_layout
from jaxspec.decode.packing import pack
from jaxspec.decode.prefill import Chunk
from jaxspec.decode.programs import lower
from jaxspec.decode.state import DecodeConfig, LaunchInput, RowLimits, Variant
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.ngram import NGram
from jaxspec.models.config import ModelConfig, Rope
from jaxspec.models.decoder import abstract_params
from jaxspec.models.layers import Backend
from jaxspec.models.paged import PagedModel
from jaxspec.parallel.mesh import MODEL_AXES, PAGES_SPEC, sharding
from jaxspec.sampling.distribution import SamplingRows
from tests.tpu_topology import tpu_mesh
from tests.uncached import no_compilation_cache

K, B, PAGE = 4, 8, 32
CONTEXT = 1024
NUM_PAGES = B * CONTEXT // PAGE * 2
QWEN3 = ModelConfig(
    family="qwen3",
    vocab_size=151936,
    num_layers=28,
    width=1024,
    mlp_width=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_model_len=40960,
    windows=(None,) * 28,
    rope=Rope(1e6),
    qk_norm=True,
)


def layers(count: int) -> ModelConfig:
    return dataclasses.replace(QWEN3, num_layers=count, windows=(None,) * count)


class Program:
    """Static config, and shapes with shardings for every argument."""

    def __init__(self, chip: str, target: ModelConfig, draft: ModelConfig | None, variant: Variant) -> None:
        devices = np.array(tpu_mesh(chip).devices).reshape(-1, 1)
        self.mesh = Mesh(devices, MODEL_AXES, axis_types=(AxisType.Auto,) * 2)
        models = {"target": target} | ({"draft": draft} if draft else {})
        self.params = {name: abstract_params(c, jnp.bfloat16, self.mesh) for name, c in models.items()}
        paged = {name: PagedModel(c, self.layout(c), CONTEXT, Backend("tpu", self.mesh)) for name, c in models.items()}
        # Noise over the whole vocabulary, once a draft token, is what takes long to compile.
        self.num_drafts = 1 if variant.standard else K
        drafter = DraftModel(self.num_drafts, paged["draft"]) if draft else NGram(K)
        self.config = DecodeConfig(paged["target"], drafter, variant)
        self.cache = PagedKVCache(*(self.pages(p.layout) for p in paged.values()))
        self.cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.cache)) // devices.size
        self.num_layers = sum(c.num_layers for c in models.values())

    def layout(self, config: ModelConfig) -> CacheLayout:
        return cache_layout(config, page_size=PAGE, num_pages=NUM_PAGES, dtype=jnp.bfloat16, platform="tpu")

    def pages(self, layout: CacheLayout) -> tuple[jax.ShapeDtypeStruct, ...]:
        placed = sharding(self.mesh, PAGES_SPEC)
        return (jax.ShapeDtypeStruct(layout.shape, layout.dtype, sharding=placed),) * layout.num_layers

    def array(self, dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(self.mesh))

    def compile(self, name: str, *arrays) -> jax.stages.Compiled:
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh), no_compilation_cache():
            packed = jax.eval_shape(pack, arrays)
            packed = dataclasses.replace(packed, words=self.array(jnp.int32, *packed.words.shape))
            return lower(name, self.config, self.params, self.cache, packed).compile()

    def launch(self) -> jax.stages.Compiled:
        row_pages = -(-(CONTEXT + K) // PAGE)
        column = lambda dtype: self.array(dtype, B)
        i32, f32 = jnp.int32, jnp.float32
        sampling = SamplingRows(
            temperature=column(f32),
            top_k=column(i32),
            top_p=column(f32),
            min_p=column(f32),
            seed=self.array(jnp.uint32, B, 2),
            coupled=column(jnp.bool_),
        )
        batch = LaunchInput(
            tokens=self.array(i32, B, row_pages * PAGE + 1),
            num_tokens=column(i32),
            draft_len=column(i32),
            live=column(jnp.bool_),
            block_table=self.array(i32, B, row_pages),
            sampling=sampling,
            limits=RowLimits(column(i32), column(i32), self.array(i32, B, 4)),
        )
        return self.compile("launch", batch, self.array(i32), self.array(jnp.bool_), self.array(f32))

    def prefill(self, length: int = 256) -> jax.stages.Compiled:
        i32, row_pages = jnp.int32, -(-(CONTEXT + K) // PAGE)
        chunk = Chunk(
            tokens=self.array(i32, B, length),
            start=self.array(i32, B),
            length=self.array(i32, B),
            block_table=self.array(i32, B, row_pages),
        )
        return self.compile("prefill", chunk)


def check(program: Program, compiled: jax.stages.Compiled, temporary: int) -> str:
    """In place, within `temporary` bytes, without the host; -> the program's text."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes >= program.cache_bytes
    table = re.search(r"input_output_alias=\{(.*?)\}, entry", text).group(1)
    leaves = len(jax.tree.leaves(program.cache))
    aliased = {int(out or 0): int(at) for out, at in re.findall(r"\{(\d*)\}: \((\d+), \{\}, ", table)}
    assert aliased == {i: aliased[0] + i for i in range(leaves)}
    assert memory.temp_size_in_bytes < temporary, f"{memory.temp_size_in_bytes / 1e6:.1f} MB"
    for instruction in ("infeed", "outfeed", "send", "recv", "sort"):
        assert not re.search(rf"\s{instruction}(-start|-done)?\(", text), instruction
    return text


def kernels(text: str, name: str) -> int:
    """Calls of the Pallas kernel `name`."""
    return len(re.findall(rf'custom-call\([^\n]*custom_call_target="tpu_custom_call"[^\n]*{name}', text))


# A round's logits in float32, of which a few copies live at a time: more where rows sample.
LOGITS = B * (K + 1) * QWEN3.vocab_size * 4
VARIANTS = [
    ("v5e:1x1", layers(28), None, Variant(), 2 * LOGITS),
    ("v5e:1x1", layers(2), layers(1), Variant(), 2 * LOGITS),
    ("v5e:1x1", layers(1), dataclasses.replace(layers(1), reduced_vocab_size=32768), Variant(), 2 * LOGITS),
    ("v6e:1x1", layers(1), layers(1), Variant(standard=True), 8 * LOGITS),
]


@pytest.mark.parametrize(("chip", "target", "draft", "variant", "temporary"), VARIANTS)
def test_the_launch_compiles(chip, target, draft, variant, temporary):
    program = Program(chip, target, draft, variant)
    text = check(program, program.launch(), temporary)
    passes = target.num_layers + (program.num_drafts * draft.num_layers if draft else 0)
    assert kernels(text, "kv_write") == kernels(text, "paged_attention") == passes


def test_prefill_compiles():
    program = Program("v5e:1x1", layers(2), layers(1), Variant())
    text = check(program, program.prefill(), 200_000_000)
    assert kernels(text, "kv_write") == program.num_layers
    # Nobody reads what the last layer of each model attends to: prefill never samples.
    assert kernels(text, "paged_attention") == program.num_layers - 2
