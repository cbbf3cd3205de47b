"""Which programs hold kernels: none with kernels="reference", none on a GPU without Triton, and there a T4 (compute
capability 7.5) is asked for them in vain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxspec.api import llm
from jaxspec.inspect import info
from jaxspec.loading.weights import compute_dtype
from jaxspec.models.backend import Backend
from jaxspec.models.model import Model
from jaxspec.options.engine import KERNELS
from pallas_kernels import (
    argmax_token,
    feed_forward,
    kv_write,
    merge_tokens,
    paged_attention,
    self_attention,
    slot_mapping,
)
from pallas_kernels.device import CPU, Device
from pallas_kernels.forms import IMPLEMENTATIONS
from tests.pallas_kernels.flavours import A100, H100
from tests.support import lively_models, tiny_models
from tests.support.sizes import cases

T4 = Device("gpu", (7, 5), "Tesla T4")
WORDS = "kernels need a GPU of compute capability 8.0, Tesla T4 has 7.5"
OPS = ("merge_tokens", "slot_mapping", "kv_write", "paged_attention", "feed_forward", "self_attention", "argmax_token")


def shape(*dims, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(dims, dtype)


def traced(op: str, implementation: str | None, device: Device, rows: int = 1, dtype=jnp.bfloat16) -> str:
    how = {"implementation": implementation, "platform": device}
    x = lambda *dims: shape(*dims, dtype=dtype)
    f32 = lambda *dims: shape(*dims, dtype=jnp.float32)
    pages, table = x(100, 16, 4, 64), (shape(1, 8), shape(1))
    attention = {"scale": 0.1}
    mapping = {"page_size": 16, "max_model_len": 100, "pad_slot": 1600}
    layer = {"eps": 1e-6}
    function, arguments = {
        "merge_tokens": (lambda *a: merge_tokens(*a, **how), (shape(40), shape(8), shape(9), shape(8))),
        "slot_mapping": (
            lambda *a: slot_mapping(*a, **mapping, **how),
            (shape(48), shape(48, dtype=jnp.bool_), shape(9), shape(8, 64)),
        ),
        "kv_write": (lambda *a: kv_write(*a, **how), (pages, x(rows, 4, 64), shape(rows))),
        "paged_attention": (lambda *a: paged_attention(*a, **attention, **how), (x(1, rows, 6, 64), pages, *table)),
        "feed_forward": (
            lambda *a: feed_forward(*a[:-1], norm=a[-1], next_norm=a[-1], block=128, **layer, **how),
            (x(1, rows, 256), x(1, rows, 384), x(384, 256), x(256, 1024), x(512, 256), f32(256)),
        ),
        "self_attention": (
            lambda *a: self_attention(*a[:-1], norm=a[-1], **layer, **attention, **how),
            (x(1, rows, 256), x(256, 640), pages, shape(rows), *table, *[f32(1, rows, 32)] * 2, f32(256)),
        ),
        "argmax_token": (lambda *a: argmax_token(*a, **how), (x(rows, 256), x(1000, 256))),
    }[op]
    return str(jax.make_jaxpr(function)(*arguments))


@cases("dtype", [jnp.bfloat16, jnp.float32], quick=[jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("op", OPS)
def test_no_op_calls_a_kernel_where_there_are_none(op, rows, dtype):
    for implementation in (None, "reference", "pallas"):
        assert "pallas_call" not in traced(op, implementation, T4, rows, dtype)


@pytest.mark.parametrize("device", [H100, Device("tpu")], ids=["gpu", "tpu"])
@pytest.mark.parametrize("op", OPS)
def test_reference_calls_no_kernel(op, device):
    """Also of an op that is made of ops."""
    for rows in (1, 5, 300):
        assert "pallas_call" not in traced(op, "reference", device, rows)


@pytest.mark.parametrize("size", [256, 512])
def test_attention_has_a_kernel_up_to_heads_of_256(size):
    arrays = [
        shape(2, 1, 8, size, dtype=jnp.bfloat16),
        shape(9, 16, 2, size, dtype=jnp.bfloat16),
        shape(2, 4),
        shape(2),
    ]
    program = jax.make_jaxpr(lambda *a: paged_attention(*a, scale=1.0, platform=H100))(*arrays)
    assert ("pallas_call" in str(program)) == (size == 256)


def test_others_have_kernels():
    for op in ("paged_attention", "self_attention", "feed_forward"):
        for device in (A100, H100, "gpu"):
            assert "pallas_call" in traced(op, None, device)


@pytest.mark.parametrize("device", [H100, Device("tpu")], ids=["gpu", "tpu"])
def test_what_stays_plain_where_kernels_are_asked_for(device):
    """As docs/extending.md lists it."""
    plain = {op for op in OPS if "pallas_call" not in traced(op, "pallas", device)}
    assert plain == ({"feed_forward", "argmax_token"} if device.platform == "tpu" else set())
    prompt = {op for op in OPS if "pallas_call" not in traced(op, "pallas", device, rows=300)}
    assert prompt == {"feed_forward", "argmax_token"}


@pytest.mark.thorough
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what holds no kernel runs on CPU, too")
@cases("kernels", [None, "reference"], quick=[None])
def test_an_engine_runs_without_kernels(kernels):
    """Plain, and drafting with a model: prefill and launches, as made for the GPU, in float32."""
    sampling = lively_models.params()
    expected = lively_models.plain(lively_models.PROMPTS, tuple(sampling))
    for method in ("plain", "noisy"):
        engine = lively_models.new_engine(method, 3, kernels=kernels, device=T4)
        assert len(engine.catalogue.table_widths) == 1
        requests = lively_models.serve(engine, lively_models.PROMPTS, sampling)
        assert lively_models.texts(requests) == expected


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what holds no kernel runs on CPU, too")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run_where_they_are_asked_for(dtype):
    model = lively_models.target()
    cast = lambda w: w if w.dtype != jnp.float32 or w.ndim == 1 else w.astype(dtype)
    model = Model(model.config, {name: cast(w) for name, w in model.params.items()})
    engine = tiny_models.engine(model, None, **lively_models.OPTIONS, device=T4)
    requests = lively_models.serve(engine, lively_models.PROMPTS[:2], lively_models.params((5, 5)))
    assert [len(tokens) for tokens in lively_models.texts(requests)] == [5, 5]


def test_kernels_are_refused_in_one_line(monkeypatch):
    message = f"kernels='pallas': {WORDS}; leave the option kernels out, plain forms are used there"
    with pytest.raises(ValueError, match=message):
        Backend(T4, None, "pallas")
    with pytest.raises(ValueError, match=message):
        lively_models.new_engine(kernels="pallas", device=T4)
    monkeypatch.setattr(llm, "here", lambda: T4)
    monkeypatch.setattr(llm, "load", lambda *_: pytest.fail("it loads before it refuses"))
    with pytest.raises(ValueError, match=message):
        llm.LLM("smollm2-135m-eagle3", kernels="pallas")
    Backend(CPU, None, "pallas")


def test_what_may_be_asked_for_has_the_same_names_everywhere():
    """The option classes are read for the command line's help, and jax is not."""
    assert KERNELS == IMPLEMENTATIONS


def test_the_dtype_is_one_that_the_gpu_computes_with():
    found = [compute_dtype(name, T4).name for name in ("auto", "bfloat16", "float16")]
    assert found == ["float32", "bfloat16", "float16"]
    assert compute_dtype("auto", Device("tpu")).name == "bfloat16"
    assert info.described(T4) == f"Tesla T4: plain forms in float32, as {WORDS}"
