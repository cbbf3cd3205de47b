"""GPUs without Triton, a T4 (compute capability 7.5) for one: plain forms run there, and kernels are refused."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

from jaxspec import info, llm, loading
from jaxspec.engine.engine import Model
from jaxspec.models.layers import Backend
from pallas_kernels import (
    _device,
    feed_forward,
    kv_write,
    likeliest_token,
    merge_tokens,
    paged_attention,
    self_attention,
    slot_mapping,
)
from tests import lively, tiny
from tests.sizes import cases

WORDS = "kernels need a GPU of compute capability 8.0, Tesla T4 has 7.5"
OPS = ("merge_tokens", "slot_mapping", "kv_write", "paged_attention", "feed_forward", "self_attention", "likeliest")


@pytest.fixture
def t4(monkeypatch):
    """Programs are traced anew for it, and what was traced is not kept for others."""
    here = types.SimpleNamespace(compute_capability="7.5", device_kind="Tesla T4")
    monkeypatch.setattr(_device, "first", lambda: here)
    jax.clear_caches()
    yield
    jax.clear_caches()


def shape(*dims, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(dims, dtype)


def traced(op: str, implementation: str | None, rows: int, dtype) -> str:
    how = {"implementation": implementation, "platform": "gpu"}
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
        "likeliest": (lambda *a: likeliest_token(*a, **how), (x(rows, 256), x(1000, 256))),
    }[op]
    return str(jax.make_jaxpr(function)(*arguments))


@cases("dtype", [jnp.bfloat16, jnp.float32], quick=[jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("op", OPS)
def test_no_op_calls_a_kernel(t4, op, rows, dtype):
    for implementation in (None, "reference"):
        assert "pallas_call" not in traced(op, implementation, rows, dtype)
    with pytest.raises(NotImplementedError, match=f"{WORDS}: pass implementation=None or 'reference'"):
        traced(op, "pallas", rows, dtype)


@pytest.mark.parametrize("capability", ["8.0", "9.0", None])
def test_others_have_kernels(monkeypatch, capability):
    monkeypatch.setattr(_device, "first", lambda: types.SimpleNamespace(compute_capability=capability))
    jax.clear_caches()
    for op in ("paged_attention", "self_attention", "feed_forward"):
        assert "pallas_call" in traced(op, None, 1, jnp.bfloat16)
    jax.clear_caches()


@pytest.mark.thorough
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what holds no kernel runs on CPU, too")
@cases("kernels", [None, "reference"], quick=[None])
def test_an_engine_runs_without_kernels(t4, kernels):
    """Plain, and drafting with a model: prefill and launches, as made for the GPU, in float32."""
    sampling = lively.params()
    expected = lively.plain(lively.PROMPTS, tuple(sampling))
    for method in ("plain", "noisy"):
        engine = lively.new_engine(method, 3, kernels=kernels, platform="gpu")
        assert engine.table_widths[0] == 1  # as plain attention wants them
        requests = lively.serve(engine, lively.PROMPTS, sampling)
        assert lively.texts(requests) == expected


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what holds no kernel runs on CPU, too")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run_where_they_are_asked_for(t4, dtype):
    model = lively.target()
    cast = lambda w: w if w.dtype != jnp.float32 or w.ndim == 1 else w.astype(dtype)
    model = Model(model.config, {name: cast(w) for name, w in model.params.items()})
    engine = tiny.engine(model, None, **lively.OPTIONS, platform="gpu")
    requests = lively.serve(engine, lively.PROMPTS[:2], lively.params((5, 5)))
    assert [len(tokens) for tokens in lively.texts(requests)] == [5, 5]


def test_kernels_are_refused_in_one_line(t4, monkeypatch):
    message = f"kernels='pallas': {WORDS}; leave kernels out, plain forms run there"
    with pytest.raises(ValueError, match=message):
        Backend("gpu", None, "pallas")
    with pytest.raises(ValueError, match=message):
        lively.new_engine(kernels="pallas", platform="gpu")
    monkeypatch.setattr(llm, "this_platform", lambda: "gpu")
    monkeypatch.setattr(llm, "load", lambda *_: pytest.fail("it loads before it refuses"))
    with pytest.raises(ValueError, match=message):
        llm.LLM("smollm2-135m-draft", kernels="pallas")
    Backend("cpu", None, "pallas")


def test_the_dtype_is_one_that_the_gpu_computes_with(t4):
    found = [loading.compute_dtype(name, "gpu").name for name in ("auto", "bfloat16", "float16")]
    assert found == ["float32", "bfloat16", "float16"]
    assert loading.compute_dtype("auto", "tpu").name == "bfloat16"
    assert info.device("gpu") == f"Tesla T4: plain forms in float32, as {WORDS}"
