"""Presets, options, floors and summaries: what needs no measuring."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import statistics
import weakref

import jax
import jax.numpy as jnp
import pytest

from checkpoints import hf_config
from jaxspec.bench import bench_options, floors, models, presets
from jaxspec.bench.clock import Sample, measure, summary
from jaxspec.bench.hardware import Hardware, hardware
from jaxspec.bench.turns import Runner
from jaxspec.cache.pages import allocate
from jaxspec.common.errors import UserError
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import parameters, random_params
from jaxspec.models.model import Model
from jaxspec.models.paged import PagedModel, cache_layout
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.placement import make_placement
from jaxspec.runtime.programs import Programs
from pallas_kernels.device import CPU
from pallas_kernels.weights import nbytes
from pallas_kernels.weights.scaled import Scaled

PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_public_number_of_parameters(name):
    assert presets.num_parameters(presets.preset(name)) == PARAMETERS[name]


def test_every_preset_but_the_tiny_ones_is_counted():
    assert {name for name in presets.TABLE if not name.startswith("tiny")} == set(PARAMETERS)


def test_a_preset_is_what_its_config_file_says():
    """Heads and rotary embedding change no count, so they are compared with config.json as it is read."""
    raw = {
        "model_type": "llama",
        "vocab_size": 128256,
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    assert presets.preset("llama-3.2-1b") == hf_config.model_config(raw)
    raw = {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    assert presets.preset("qwen3-8b") == hf_config.model_config(raw)


@pytest.mark.parametrize(("name", "windows"), [("tiny", None), ("tiny-draft", None), ("tiny", (8, None))])
def test_bytes_of_a_pass(name, windows):
    """Against the arrays themselves: shapes spelled out, and the pool as it is allocated."""
    config = presets.preset(name)
    if windows:
        config = dataclasses.replace(config, windows=windows)
    params = random_params(config, jnp.bfloat16, make_placement())
    layout = cache_layout(config, page_size=16, num_pages=12, dtype=jnp.bfloat16, platform="cpu")
    model = PagedModel(config, layout, 128, Backend(CPU))
    e, f, h, g, d = config.width, config.mlp_width, config.num_heads, config.num_kv_heads, config.head_dim
    layer = 2 * (e * (h + 2 * g) * d + h * d * e + 3 * e * f) + 4 * (2 * e + 2 * d)  # bfloat16, norms float32
    head = 2 * e * config.vocab_size
    weights = config.num_layers * layer + 4 * e + head  # the head, tied or not, once
    assert floors.weight_bytes(config, params) == weights
    assert floors.weight_bytes(config, params, logits=False) == weights - head
    assert sum(w.nbytes for w in params.values()) == weights + (0 if config.tied else head)
    positions = [40 if w is None else 8 for w in config.windows]
    pages = 3 * sum(n * 2 * g * d * 2 for n in positions)
    assert floors.page_bytes(model, 3, 40) == pages
    assert floors.pass_bytes(model, params, 3, 40) == weights + pages
    # Two a number and token, but for norms, which are float32 and few.
    numbers = (weights - config.num_layers * 4 * (2 * e + 2 * d) - 4 * e) / 2
    assert floors.pass_flop(model, params, 15) == pytest.approx(2 * 15 * numbers, rel=0.02)
    wide = {name: w.astype(jnp.float32) for name, w in params.items()}  # the same, whatever they take
    assert floors.pass_flop(model, wide, 15) == floors.pass_flop(model, params, 15)
    if windows is None:  # all pages of the pool, as they are allocated
        pool = sum(page.nbytes for page in jax.tree.leaves(allocate(layout, make_placement())))
        assert floors.page_bytes(model, 1, layout.num_pages * layout.page_size) == pool


def test_flop_of_prefill():
    """Counted product by product over every token and every key that it sees."""
    config = presets.preset("tiny")
    params = random_params(config, jnp.float32, make_placement())
    e, f, h, g, d = config.width, config.mlp_width, config.num_heads, config.num_kv_heads, config.head_dim
    context, rows = 64, 3
    products = 2 * (e * (h + 2 * g) * d + h * d * e + 3 * e * f) * context
    for window, expected in ((None, sum(i + 0.5 for i in range(context))), (8, None)):
        windowed = dataclasses.replace(config, windows=(window,) * config.num_layers)
        pairs = expected or context * 8 - 8 * 8 / 2
        flop = rows * config.num_layers * (products + 2 * 2 * h * d * pairs)
        assert floors.prefill_flop(windowed, params, rows, context) == flop


def test_limits_turn_into_milliseconds():
    device = Hardware(copy_gb_s=2000.0, read_gb_s=None, peak_tflops=500.0)
    assert device.bytes_ms(4e9) == pytest.approx(2.0)
    assert device.flop_ms(1e12) == pytest.approx(2.0)
    cpu = dataclasses.replace(device, read_gb_s=4000.0)
    assert (cpu.floor_gb_s, cpu.bytes_ms(4e9)) == (4000.0, pytest.approx(1.0))


def test_hardware_is_measured():
    found = hardware(jnp.float32, launches=2, megabytes=8, side=128)
    assert 0.05 < found.copy_gb_s < 1e5
    assert found.read_gb_s is not None
    assert 0.05 < found.read_gb_s < 1e5
    assert 1e-5 < found.peak_tflops < 1e4


def test_the_median_and_the_quartiles():
    ms = [5.0, 1.0, 2.0, 100.0, 3.0]
    found = summary(ms)
    assert (found.ms, found.low, found.high) == (statistics.median(ms), 2.0, 5.0)
    assert found / 2 == Sample(1.5, 1.0, 2.5, 0.5)
    assert summary([7.0]) == Sample(7.0, 7.0, 7.0, 7.0)


def test_warm_up_is_not_timed(monkeypatch):
    calls, clock = [], iter([0.0, 0.010, 1.0, 1.030, 2.0, 2.020])
    monkeypatch.setattr("jaxspec.bench.clock.time.perf_counter", lambda: next(clock))
    found = measure(lambda: calls.append(1), 3, warm_up=2)
    assert len(calls) == 5
    assert (found.ms, found.low, found.high) == pytest.approx((20.0, 15.0, 25.0))


def test_passes_of_a_token():
    """Ten rounds that proposed 4 drafts each and yielded 3 tokens each, then 5 plain ones."""
    counts = SpecDecodeMetrics(
        num_drafts=10, num_draft_tokens=40, num_accepted_tokens_per_pos=[10, 10, 0, 0], num_emitted_tokens=35
    )
    assert Runner(None, counts=counts).passes == (15 / 35, 40 / 35)
    assert Runner(None, counts=SpecDecodeMetrics(num_emitted_tokens=7)).passes == (1.0, 0.0)


def test_stages_come_in_the_table_s_order():
    assert bench_options.stages("round,target", never_slower=True, draft=False) == ("target", "round", "adaptive")
    default = bench_options.stages(None, never_slower=False, draft=True)
    assert set(default) == set(bench_options.STAGES) - {"adaptive", "load"}
    assert "draft" not in bench_options.stages(None, never_slower=False, draft=False)


def test_lists():
    assert bench_options.listed("-k", "2, 4,4,6") == (2, 4, 6)
    assert bench_options.listed("-x", "1.5,3", float) == (1.5, 3.0)
    assert json.dumps(bench_options.listed("-k", "1")) == "[1]"
    assert bench_options.listed("--tree", "4,4,17", repeats=True) == (4, 4, 17)


@pytest.mark.parametrize(
    ("tree", "preset", "said"),
    [
        ((4, 4), "tiny+eagle3", "--tree 4,4: give width,depth,nodes"),
        ((2, 2, 5), "tiny", "--tree 2,2,5: give width,depth,nodes, and a draft that grows it"),
        ((9, 9, 3), "tiny+eagle3", "tree_nodes=3 must lie in 74..257"),
    ],
)
def test_trees_that_cannot_be(tree, preset, said):
    with pytest.raises(UserError, match=re.escape(said)):
        bench_options.BenchOptions(preset=preset, tree=tree, stages=("round",))


@pytest.mark.parametrize(("k", "length"), [(4, 1.2), (4, 3.0), (4, 4.0), (1, 1.5), (8, 2.0), (4, 1.0), (4, 5.0)])
def test_rates_that_fade_have_their_length(k, length):
    rates = bench_options.fading_rates(k, length)
    assert len(rates) == k
    assert 1 + sum(rates) == pytest.approx(length, abs=1e-9)
    assert all(later == pytest.approx(before * rates[0]) for before, later in itertools.pairwise(rates))
    assert SpeculativeConfig(
        model="x", num_speculative_tokens=k, rejection_sample_method="synthetic", synthetic_acceptance_rates=rates
    )


def test_a_preset_is_quantised_as_it_is_made(monkeypatch):
    """At most one matrix of its is there in the compute dtype, and only so much memory is asked for."""
    config, dense, alive = presets.preset("tiny"), [], []
    quantiser = models.quantiser

    def watched(form):
        def keep(name, parameter, x):
            alive.append(sum(ref() is not None for ref in dense))
            if parameter.is_quantised:
                dense.append(weakref.ref(x))
            return quantiser(form)(name, parameter, x)

        return keep

    monkeypatch.setattr(models, "quantiser", watched)
    params = random_params(config, jnp.bfloat16, make_placement(), keep=models.published_in("int8"))
    assert len(dense) == 8
    assert max(alive) == 0
    largest = max(2 * x.size for x in params.values() if isinstance(x, Scaled))
    whole = sum(p.nbytes for p in parameters(config, jnp.bfloat16).values())
    assert nbytes(params) + largest < whole
    check = functools.partial(models.check_weights_fit, "tiny", config, jnp.dtype("bfloat16"), make_placement())
    monkeypatch.setattr(models, "memory", lambda device: {"bytes_limit": whole - 1, "bytes_in_use": 0})
    check("int8")
    with pytest.raises(UserError, match="tiny needs"):
        check(None)
    room = {"bytes_limit": nbytes(params) + largest - 1, "bytes_in_use": 0}
    monkeypatch.setattr(models, "memory", lambda device: room)
    with pytest.raises(UserError, match="tiny needs"):
        check("int8")


@pytest.mark.parametrize("window", [None, 16])
def test_a_pool_that_does_not_fit_is_refused(window, monkeypatch):
    """Layers with a window take only their own pool's memory."""
    config = dataclasses.replace(presets.preset("tiny"), windows=(window, None))
    target = Model(config, random_params(config, jnp.float32, make_placement()))
    options = bench_options.BenchOptions(
        preset="tiny", model=None, draft=None, batch_sizes=(3,), contexts=(1500,), ks=(2,), lengths=(), dtype="auto",
        stages=("round",), temperature=0.0, kernels=None, launches=2,
    )  # fmt: skip
    setup = models.Setup(options, CPU, jnp.float32, make_placement(), target, None, None, Programs(make_placement()))
    room = {"bytes_limit": 1 << 40, "bytes_in_use": 0}
    monkeypatch.setattr(models, "memory", lambda device: room)
    layout = setup.engine(3, 1500, None).layout
    assert (layout.num_window_pages is None) == (window is None)
    page = 16 * 2 * 2 * 16 * 4  # tokens, keys and values, heads, size, bytes
    need = room["bytes_limit"] = page * (layout.num_pages + (layout.num_window_pages or layout.num_pages))
    setup.engine(3, 1500, None)
    room["bytes_limit"] = need - 1
    with pytest.raises(UserError, match=r"^the cache needs .* GB are free: lower --batch-size or --context$"):
        setup.engine(3, 1500, None)
