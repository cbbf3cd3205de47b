"""The GPU forms lowered for a GPU that is not there: what Triton's dialect refuses shows here."""

import re
import sys
import types
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import (
    _few_rows,
    argmax_token,
    feed_forward,
    kv_write,
    merge_tokens,
    paged_attention,
    self_attention,
    slot_mapping,
)
from pallas_kernels._split_product import split_product
from pallas_kernels.device import of
from pallas_kernels.lowering import quick_lowering
from tests.pallas_kernels.flavours import A100, H100
from tests.support.sizes import cases

GPU = {"implementation": "pallas", "platform": "gpu"}
HERE = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
MESH = AbstractMesh((1,), ("model",), axis_types=(AxisType.Auto,), abstract_device=HERE)


def shape(*dims, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(dims, dtype)


MAPPED = shape(48), shape(48, dtype=jnp.bool_), shape(9), shape(8, 64)


def lowered(function, *shapes) -> str:
    with jax.sharding.use_abstract_mesh(MESH):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def assert_lowers(function, *shapes):
    assert "xla.gpu.triton" in lowered(function, *shapes)


def test_nothing_is_looked_for_again_and_again(monkeypatch):
    """MLIR asks for a module of each dialect, at each operation where there is none."""
    asked: Counter[str] = Counter()

    class Spy:
        def find_spec(self, name, path=None, target=None):
            asked[name] += 1

    monkeypatch.setattr(sys, "meta_path", [Spy(), *sys.meta_path])
    with quick_lowering():
        assert_lowers(lambda *a: slot_mapping(*a, page_size=16, max_model_len=1000, pad_slot=16000, **GPU), *MAPPED)
    assert all(count < 10 for count in asked.values()), asked.most_common(3)


def test_a_kernel_is_lowered_once():
    """Whichever case of an op calls it: a layer's second half in a model, and at its end."""
    rows, width, mlp = 2, 1024, 3072
    shapes = [shape(*s, dtype=jnp.bfloat16) for s in ((rows, width), (width, width), (width, 2 * mlp), (mlp, width))]
    norm = shape(width, dtype=jnp.float32)

    def layers(x, out, gate_up, down, norm):
        options = {"eps": 1e-6, "block": 128, "platform": H100, "implementation": "pallas"}
        for _ in range(2):
            x, _ = feed_forward(x, x, out, gate_up, down, norm=norm, next_norm=norm, **options)
        return feed_forward(x, x, out, gate_up, down, norm=norm, **options)[0]

    calls = [line for line in lowered(layers, *shapes, norm).splitlines() if "xla.gpu.triton" in line]
    times = Counter(re.sub(r"%\w+", "", line) for line in calls)
    assert len(times) == 5
    assert max(times.values()) == 2  # of the first layer again, since an argument's type says where it lies


def test_merge_tokens():
    assert_lowers(lambda *a: merge_tokens(*a, **GPU), shape(40), shape(8), shape(9), shape(8))


def test_slot_mapping():
    options = {"page_size": 16, "max_model_len": 1000, "pad_slot": 16000}
    assert_lowers(lambda *a: slot_mapping(*a, **options, **GPU), *MAPPED)


@cases("heads", [(1, 64), (3, 96), (8, 128), (8, 256)], quick=[(3, 96)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_kv_write(heads, dtype):
    g, d = heads
    pages, kv = shape(1000, 16, 2 * g, d, dtype=dtype), shape(40, 2 * g, d, dtype=dtype)
    assert_lowers(lambda *a: kv_write(*a, **GPU), pages, kv, shape(40))


@cases("heads", [(1, 16), (3, 64), (3, 96), (8, 128), (8, 256)], quick=[(1, 16), (8, 128)], ids=str)
@cases("num_tokens", [1, 5, 512], quick=[5])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_paged_attention(heads, num_tokens, dtype):
    g, d = heads
    query, pages = shape(8, num_tokens, 3 * g, d, dtype=dtype), shape(1000, 16, 2 * g, d, dtype=dtype)
    options = {"scale": d**-0.5, "window": 100, "soft_cap": 20.0}
    assert_lowers(lambda *a: paged_attention(*a, **options, **GPU), query, pages, shape(8, 64), shape(8))


@cases("activation", ["silu", "gelu_tanh"], quick=["silu"])
@pytest.mark.parametrize(("rows", "device", "kernels"), [(1, A100, 3), (5, A100, 0), (5, H100, 5), (32, H100, 5)])
def test_feed_forward(rows, device, kernels, activation):
    row = lambda *dims: shape(*dims, dtype=jnp.bfloat16)
    shapes = row(1, rows, 1024), row(1, rows, 2048), row(2048, 1024), row(1024, 6144), row(3072, 1024)
    options = {"eps": 1e-6, "activation": activation, "block": 128, "platform": device}
    both = lambda *a: feed_forward(*a[:-1], norm=a[-1], next_norm=a[-1], **options)
    assert lowered(both, *shapes, shape(1024, dtype=jnp.float32)).count("xla.gpu.triton") == kernels


@cases(("rows", "asking"), [(1, 0), (2, 3), (16, 3), (17, 0)], quick=[(2, 3), (17, 0)])
def test_products_of_some_rows_ask_for_the_weights_behind(rows, asking):
    row = lambda *dims: shape(*dims, dtype=jnp.bfloat16)
    shapes = row(1, rows, 1024), row(1, rows, 2048), row(2048, 1024), row(1024, 6144), row(3072, 1024)
    options = {"eps": 1e-6, "block": 128, "platform": H100}
    both = lambda *a: feed_forward(*a[:-1], norm=a[-1], next_norm=a[-1], next_qkv=a[3], **options)
    # Two lines a thread, in each of the kernels out, gate_up and down.
    assert lowered(both, *shapes, shape(1024, dtype=jnp.float32)).count("prefetch.global.L2") == 2 * asking


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "device", "kernels"),
    [
        (1, 1024, jnp.bfloat16, H100, 1),
        (80, 576, jnp.bfloat16, H100, 1),
        (97, 1024, jnp.bfloat16, H100, 0),
        (16, 96, jnp.bfloat16, H100, 0),
        (16, 1024, jnp.float32, H100, 0),
        (16, 1024, jnp.bfloat16, A100, 0),
    ],
)
def test_argmax_token(rows, width, dtype, device, kernels):
    shapes = shape(rows, width, dtype=dtype), shape(1000, width, dtype=dtype)
    assert lowered(lambda *a: argmax_token(*a, platform=device), *shapes).count("xla.gpu.triton") == kernels


def lowered_self_attention(rows, heads, row_pages=64, device=A100):
    (b, t), (h, g, d) = rows, heads
    f32 = lambda *dims: shape(*dims, dtype=jnp.float32)
    bf16 = lambda *dims: shape(*dims, dtype=jnp.bfloat16)
    width = (h + 2 * g) * d
    arguments = {
        "x": bf16(b, t, 1024), "qkv": bf16(1024, width), "pages": bf16(1000, 16, 2 * g, d), "slots": shape(b * t),
        "block_table": shape(b, row_pages), "kv_len": shape(b), "cos": f32(b, t, d // 2), "sin": f32(b, t, d // 2),
        "norm": f32(1024), "bias": bf16(width), "q_norm": f32(d), "k_norm": f32(d),
    }  # fmt: skip
    options = {"eps": 1e-6, "scale": d**-0.5, "window": 100, "soft_cap": 20.0, "platform": device}
    return lowered(lambda *a: self_attention(**dict(zip(arguments, a, strict=True)), **options), *arguments.values())


@cases("rows", [(1, 1), (1, 5), (16, 1), (16, 2), (8, 64)], quick=[(1, 1), (16, 2)], ids=str)
@cases("heads", [(16, 8, 128), (9, 3, 64), (4, 1, 256)], quick=[(9, 3, 64)], ids=str)
def test_self_attention(rows, heads):
    assert "xla.gpu.triton" in lowered_self_attention(rows, heads)


@cases(
    ("rows", "group", "row_pages", "kernels"),
    [
        ((16, 1), 2, 64, 2),
        ((16, 4), 2, 64, 2),
        ((16, 5), 2, 64, 3),  # more than 16 rows in the tile of what is new
        ((16, 2), 6, 64, 2),
        ((16, 2), 7, 64, 3),
        ((16, 1), 2, 65, 4),  # keys enough for several programs, whose results a kernel combines
        ((8, 1), 2, 64, 4),  # too few programs without splits
    ],
    quick=[((16, 1), 2, 64, 2), ((16, 5), 2, 64, 3)],
)
def test_a_program_that_has_all_keys_has_all_that_is_new(rows, group, row_pages, kernels):
    text = lowered_self_attention(rows, (8 * group, 8, 128), row_pages, H100)
    assert text.count("xla.gpu.triton") == kernels


def test_layers_share_what_is_lowered():
    """Lowering a kernel takes longer than compiling it, and a model calls each dozens of times."""
    pages, kv = shape(1000, 16, 16, 128, dtype=jnp.bfloat16), shape(40, 16, 128, dtype=jnp.bfloat16)
    three = lambda pages, kv, slots: [kv_write(p, kv, slots, **GPU) for p in pages]
    assert lowered(three, [pages] * 3, kv, shape(40)).count("xla.gpu.triton") == 1


@pytest.mark.parametrize(
    ("capability", "early", "much", "triton", "bfloat16"),
    [
        ("9.0", True, True, True, True), ("10.3", True, True, True, True), ("12.0", True, False, True, True),
        ("8.9", False, False, True, True), ("7.5", False, False, False, False),
        ("gfx942", False, False, False, True), (None, False, False, False, True),
    ],
)  # fmt: skip
def test_what_a_gpu_can_do(capability, early, much, triton, bfloat16):
    """Nothing of NVIDIA's is expected of a GPU whose capability cannot be read."""
    told = {} if capability is None else {"compute_capability": capability}
    device = of(types.SimpleNamespace(platform="gpu", device_kind="some GPU", **told))
    assert (device.starts_early, device.shares_much) == (early, much)
    assert (device.has_triton, device.lacks_bfloat16) == (triton, not bfloat16)


def small_product(x, weights, device):
    return split_product(x[0], weights, device=device)["sums"]


@pytest.mark.parametrize("kernel", [small_product, _few_rows.product], ids=["one row", "few rows"])
@pytest.mark.parametrize("device", [A100, H100])
def test_a_kernel_asks_for_the_next_only_where_that_can_be_done(kernel, device):
    shapes = shape(2, 1024, dtype=jnp.bfloat16), shape(1024, 512, dtype=jnp.bfloat16)
    text = lowered(lambda *a: kernel(*a, device=device), *shapes)
    assert ("griddepcontrol.launch_dependents" in text) == (device == H100)
