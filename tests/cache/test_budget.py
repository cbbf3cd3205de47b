"""Memory becomes pages: the same number for both models."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.cache import budget, windows
from jaxspec.cache.pages import allocate, features_layout
from jaxspec.common.errors import UserError
from jaxspec.engine.sizing import demand
from jaxspec.hardware.platforms import facts
from jaxspec.models.paged import cache_layout
from jaxspec.options.engine import EngineConfig
from jaxspec.parallel.placement import make_placement
from tests.support import tiny_models


@given(memory=st.integers(1, 10**12), target=st.integers(1, 10**7), draft=st.integers(0, 10**7))
def test_both_models_fit_and_one_page_more_does_not(memory, target, draft):
    if memory < target + draft:
        with pytest.raises(ValueError, match="raise memory_utilization or take a smaller model"):
            budget.num_pages(memory, target, draft)
        return
    pages = budget.num_pages(memory, target, draft)
    assert pages * (target + draft) <= memory < (pages + 1) * (target + draft)
    alone = budget.num_pages(memory, target)
    assert alone == memory // target
    assert pages >= alone * target // (target + draft), "never fewer than the target's share"


@given(
    memory=st.integers(1, 10**9),
    others=st.integers(0, 10**5),
    window=st.integers(1, 10**5),
    needed=st.integers(1, 10**4),
    most=st.integers(1, 10**4),
)
def test_layers_with_a_window_have_their_own_pool_where_it_pays(memory, others, window, needed, most):
    memory += others + window
    alike = budget.num_pages(memory, others + window)
    demand = budget.Demand([others + window], most, budget.Windows(window, needed))
    pages, in_windows = budget.pools(memory, demand)
    assert budget.pools(memory, demand._replace(windows=None)) == (alike, None)
    if alike >= most or needed >= alike:
        assert (pages, in_windows) == (alike, None)
        return
    in_windows = pages if in_windows is None else in_windows
    assert needed <= in_windows <= pages <= most
    assert needed < alike <= pages
    assert pages * others + in_windows * window <= memory
    assert pages == most or (pages + 1) * others + needed * window > memory
    assert in_windows == pages or pages * others + (in_windows + 1) * window > memory


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_gpu_kernels_can_index_all_pages(kv_dtype):
    """Offsets in an array of 8 bits of up to 2^32 bytes are signed and have 32 bits."""
    sizes = {"page_size": 16, "num_pages": 1, "dtype": "bfloat16", "kv_dtype": kv_dtype}
    layouts = {name: cache_layout(tiny_models.FAMILIES["gemma4"], **sizes, platform=name) for name in ("gpu", "tpu")}
    of_windows, others = (16 * 2 * 2 * facts("gpu").head_size(size) for size in (16, 32))  # elements of a page
    config = EngineConfig(max_num_seqs=4, kv_cache_dtype="auto" if kv_dtype == "bfloat16" else kv_dtype)
    found = {p: demand({"target": x}, config, None, 1 << 24, {"target": 1}, p) for p, x in layouts.items()}
    windows = found["gpu"].windows
    assert windows is not None
    assert [found["tpu"].most, found["tpu"].windows.most] == [(1 << 31) - 1] * 2
    if kv_dtype == "bfloat16":
        assert (found["gpu"].most, windows.most) == ((1 << 31) - 1, (1 << 31) - 1)
        return
    assert (found["gpu"].most, windows.most) == (2**31 // others, 2**31 // of_windows)
    assert found["gpu"].used > 2**31 // others
    memory = 2**36
    assert budget.pools(memory, found["gpu"])[0] == 2**31 // others < budget.pools(memory, found["tpu"])[0]
    alike = found["gpu"]._replace(windows=None, most=2**31 // others)
    assert budget.pools(memory, alike) == (2**31 // others, None)
    assert budget.given(2**31 // others, alike) == (2**31 // others, None)
    with pytest.raises(
        UserError, match=r"^num_pages=\d+, but GPU kernels index at most \d+ pages in 8 bits: lower it$"
    ):
        budget.given(2**31 // others + 1, alike)


def test_the_pool_of_layers_with_a_window_by_hand():
    """Each of two rows needs 21 positions: a window of 12, two of an assistant's less its own, and eight of a launch.

    6 pages of 4 hold them, or 8 if they begin midway. A pass has 16 tokens more.
    """
    assert windows.needed(12, num_rows=2, ahead=8, pass_tokens=16, page_size=4) == 2 * 8 + 4
    sizes = {"page_size": 4, "num_pages": 9, "dtype": "float32", "platform": "cpu"}
    layout = dataclasses.replace(cache_layout(tiny_models.FAMILIES["gemma4"], **sizes), num_window_pages=5)
    assert layout.window_pool == (5, 12)
    window, full = (4 * 2 * 2 * size * 4 for size in (16, 32))  # tokens, keys and values, heads, bytes
    assert (layout.stored_bytes(1, "cpu"), layout.window_bytes(1, "cpu")) == (window + full, window)
    assert layout.pool_bytes(1, "cpu") == 5 * window + 9 * full
    found = allocate(layout, make_placement())
    assert [leaf.nbytes for leaf in jax.tree.leaves(found)] == [5 * window, 9 * full]


@dataclasses.dataclass
class Device:
    platform: str
    stats: dict | None

    def memory_stats(self):
        return self.stats


def test_free_memory():
    known = Device("gpu", {"bytes_limit": 1000, "bytes_in_use": 300})
    assert budget.free_memory(known, 0.9, 50) == 550
    for unknown in (Device("cpu", {"bytes_limit": 1000, "bytes_in_use": 300}), Device("tpu", None), Device("gpu", {})):
        assert budget.free_memory(unknown, 0.9, 50) == facts("cpu").cache_bytes


@pytest.mark.parametrize(
    ("platform", "sizes"),
    [
        ("cpu", {8: 8, 80: 80}),
        ("tpu", {8: 128, 64: 128, 80: 128, 128: 128, 256: 256}),
        ("gpu", {8: 16, 64: 64, 80: 128}),
    ],
)
def test_head_sizes_are_padded_for_the_kernels(platform, sizes):
    assert {size: facts(platform).head_size(size) for size in sizes} == sizes


@pytest.mark.parametrize(
    ("heads", "devices", "stored"), [(1, 1, 2), (2, 1, 4), (3, 1, 8), (4, 1, 8), (8, 4, 4), (5, 1, 16)]
)
def test_a_tpu_stores_heads_by_eights(heads, devices, stored):
    """tests/decode/test_tpu.py sees as many bytes in compiled programs."""
    config = dataclasses.replace(tiny_models.BASE, num_heads=heads, num_kv_heads=heads)
    layout = cache_layout(config, page_size=32, num_pages=5, dtype=jnp.bfloat16, platform="tpu")
    assert layout.stored_bytes(devices, "tpu") == config.num_layers * 32 * stored * 128 * 2
    assert layout.stored_bytes(devices, "cpu") == layout.page_bytes // devices


@pytest.mark.parametrize(
    ("heads", "devices", "values", "scales"), [(1, 1, 4, 128), (8, 1, 16, 512), (8, 4, 4, 128), (3, 1, 8, 256)]
)
def test_a_tpu_pads_pages_in_8_bits(heads, devices, values, scales):
    """Values to four heads, and a page's row of scales to whole lanes, of which every scale takes four bytes."""
    config = dataclasses.replace(tiny_models.BASE, num_heads=heads, num_kv_heads=heads)
    sizes = {"page_size": 32, "num_pages": 5, "dtype": jnp.bfloat16}
    layout = cache_layout(config, **sizes, platform="tpu", kv_dtype="int8")
    assert layout.stored_bytes(devices, "tpu") == config.num_layers * (32 * values * 128 + 4 * scales)
    assert layout.stored_bytes(devices, "cpu") == layout.page_bytes // devices


@pytest.mark.parametrize(("width", "devices", "stored"), [(33280, 1, 33280), (33280, 8, 4224), (200, 2, 128)])
def test_a_tpu_pads_features_to_whole_lanes(width, devices, stored):
    """`tests/decode/test_tpu_families.py` sees as many bytes in the compiled program of Muse Glimmer on eight chips."""
    layout = features_layout(width, page_size=32, num_pages=5, dtype="bfloat16")
    assert layout.stored_bytes(devices, "tpu") == 32 * stored * 2
    assert layout.stored_bytes(devices, "cpu") == layout.page_bytes // devices


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_page_bytes_are_what_is_allocated(dtype):
    sizes = {"page_size": 16, "num_pages": 5, "dtype": "float32", "platform": "cpu"}
    layout = cache_layout(tiny_models.BASE, **sizes, kv_dtype=dtype)
    pages = allocate(layout, make_placement())
    assert len(pages) == tiny_models.BASE.num_layers
    assert all(memory.pages.dtype == jnp.dtype(dtype) for memory in pages)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pages)) == layout.page_bytes * 5
    assert layout.pad_slot == 80
