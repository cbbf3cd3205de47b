"""The TPU forms through the real TPU compiler, which needs no TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.layout import Format, Layout

from checkpoints.forms import abstract
from checkpoints.gguf_blocks import form as of_blocks
from jaxspec.options.quantization import FORMS, Quantization
from pallas_kernels import kv_write, merge_tokens, paged_attention, plain, slot_mapping
from pallas_kernels.weights import grouped, product
from tests.support import hlo
from tests.support.sizes import cases
from tests.support.tpu_topology import tpu_compile, tpu_sharding

TOPOLOGIES = ["v5e:1x1", "v6e:1x1"]
HEADS = [(1, 64), (3, 64), (8, 64), (1, 128), (3, 128), (8, 128), (1, 256), (3, 256), (8, 256)]  # G, D
TPU = {"implementation": "pallas", "platform": "tpu"}
NUM_PAGES, PAGE_SIZE, ROWS, ROW_PAGES = 256, 32, 8, 64
WIDTH = 2048
# Without Q6_K, whose groups of 16 are dequantised.
QUANTISED = {**FORMS, **{kind: of_blocks(kind) for kind in grouped.BLOCKS if kind != "q6_k"}}


def shape(*dims, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(dims, dtype)


@cases("topology", TOPOLOGIES, quick=TOPOLOGIES[:1])
@cases("num_tokens", [0, 40], quick=[40])
def test_merge_tokens_and_slot_mapping(topology, num_tokens):
    def both(tokens, next_tokens, query_start, num_rejected, block_table):
        options = {"page_size": PAGE_SIZE, "max_model_len": 1000, "pad_slot": NUM_PAGES * PAGE_SIZE}
        merged, rejected = merge_tokens(tokens, next_tokens, query_start, num_rejected, **TPU)
        return slot_mapping(merged, rejected, query_start, block_table, **options, **TPU)

    shapes = shape(num_tokens), shape(ROWS), shape(ROWS + 1), shape(ROWS), shape(ROWS, ROW_PAGES)
    assert "tpu_custom_call" in tpu_compile(topology, both, *shapes).as_text()


@cases("topology", TOPOLOGIES, quick=TOPOLOGIES[:1])
@cases("heads", HEADS, quick=[(8, 128)])
def test_a_loop_writes_in_place(topology, heads):
    g, d = heads
    pages = shape(NUM_PAGES, PAGE_SIZE, 2 * g, d, dtype=jnp.bfloat16)

    def loop(pages, kv, slots):
        body = lambda carry: (carry[0] + 1, kv_write(carry[1], kv, slots + carry[0], **TPU))
        return lax.while_loop(lambda carry: carry[0] < 5, body, (0, pages))[1]

    kv = shape(5 * ROWS, 2 * g, d, dtype=jnp.bfloat16)
    # Pages lie as the kernels read them: left the choice, the compiler orders narrow heads otherwise, and copies.
    anywhere = tpu_sharding(topology)
    by_row = Format(Layout((0, 1, 2, 3)), anywhere)
    options = {"in_shardings": (by_row, anywhere, anywhere), "out_shardings": by_row, "donate_argnums": 0}
    memory = tpu_compile(topology, loop, pages, kv, shape(5 * ROWS), **options).memory_analysis()
    size = 2 * np.prod(pages.shape)
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 0.05 * size


def compile_attention(topology, heads, num_tokens, dtype, **options):
    g, d = heads
    query, pages = shape(ROWS, num_tokens, 4 * g, d, dtype=dtype), shape(NUM_PAGES, PAGE_SIZE, 2 * g, d, dtype=dtype)
    attend = lambda *arguments: paged_attention(*arguments, scale=d**-0.5, **options, **TPU)
    return tpu_compile(topology, attend, query, pages, shape(ROWS, ROW_PAGES), shape(ROWS)).as_text()


@cases("topology", TOPOLOGIES, quick=TOPOLOGIES[:1])
@cases("heads", HEADS, quick=[(3, 64)])
def test_paged_attention(topology, heads):
    assert "tpu_custom_call" in compile_attention(topology, heads, 5, jnp.bfloat16)


@cases(("rows", "row_pages"), [(64, 4097), (256, 1281)], quick=[(64, 4097)])
def test_block_tables_need_not_fit_into_scalar_memory(rows, row_pages):
    """131,072 positions of 64 rows, 40,960 of 256."""
    bf16 = functools.partial(shape, dtype=jnp.bfloat16)
    attend = lambda *arguments: paged_attention(*arguments, scale=1.0, **TPU)
    arguments = bf16(rows, 5, 8, 64), bf16(NUM_PAGES, PAGE_SIZE, 4, 64), shape(rows, row_pages), shape(rows)
    assert "tpu_custom_call" in tpu_compile("v5e:1x1", attend, *arguments).as_text()


@cases("page_size", [256, 512], quick=[256])
def test_large_pages_fit_vmem_or_take_plain_attention(page_size):
    bf16 = functools.partial(shape, dtype=jnp.bfloat16)
    arguments = bf16(2, 512, 8, 128), bf16(8, page_size, 16, 128), shape(2, 8), shape(2)
    attend = lambda *arguments: paged_attention(*arguments, scale=1.0, **TPU)
    assert ("tpu_custom_call" in tpu_compile("v5e:1x1", attend, *arguments).as_text()) == (page_size == 256)


@cases("num_tokens", [1, 512], quick=[512])
@cases("dtype", [jnp.bfloat16, jnp.float32], quick=[jnp.bfloat16])
def test_paged_attention_fits_vmem(num_tokens, dtype):
    """The smallest VMEM, a prompt chunk and the largest heads."""
    options = {"window": 100, "soft_cap": 20.0}
    assert "tpu_custom_call" in compile_attention("v5e:1x1", (8, 256), num_tokens, dtype, **options)


def copies(form: Quantization, multiply) -> list[str]:
    """Instructions that make an array as large as the weights, in a loop of products with weights of this form."""
    weight = abstract(form, (WIDTH, WIDTH), "bfloat16")

    def loop(x, weight):
        return lax.fori_loop(0, 3, lambda _, x: multiply(x, weight), x)

    x = shape(5 * ROWS, WIDTH, dtype=jnp.bfloat16)
    read = hlo.Program(tpu_compile("v5e:1x1", loop, x, weight).as_text())
    stored = {leaf.size for leaf in jax.tree.leaves(weight) if leaf.size >= WIDTH * WIDTH // 2}
    return hlo.made(read.all, {WIDTH * WIDTH, *stored}, prefetched=True)


@cases("name", QUANTISED, quick=["int8", "int8_block", "int4_32"], rest=["int4_asym_32", "q4_k"])
def test_quantised_weights_are_read_where_they_lie(name):
    assert not copies(QUANTISED[name], product)


@pytest.mark.parametrize("name", ["int8", "int8_block", "int4_32"])
def test_a_dequantised_copy_is_found(name):
    """Planted: the weights are dequantised first."""
    assert copies(QUANTISED[name], lambda x, weight: plain.dot(x, lax.optimization_barrier(weight.rows()), 1, x.dtype))
