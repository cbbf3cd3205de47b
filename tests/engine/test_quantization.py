"""Weights in 8 bits: requests that are preempted, or whose beginning is known, get the tokens of plain decoding.

The same tokens pass through products of one row, of a verification and of a prefill. They would differ if a form of
weights rounded activations at one number of rows only.
"""

from __future__ import annotations

import dataclasses

from jaxspec.loading.quantised import quantised
from jaxspec.models.decoder import parameters
from jaxspec.models.model import Model
from jaxspec.options.quantization import FORMS
from jaxspec.options.sampling_params import SamplingParams
from pallas_kernels.weights import dense
from tests.support import tiny_models
from tests.support.lively_models import lively, noisy, repeating, serve, speculation, texts
from tests.support.sizes import cases

K, PAGE = 3, 4
CONFIG = dataclasses.replace(tiny_models.BASE, width=128, mlp_width=128, head_dim=32)  # whole blocks of 128
LONG = repeating(24, 7, 1)
PROMPTS = (LONG, (*LONG[:18], 60, 61, 62), repeating(5, 3, 2), (9, 8))
TEMPERATURES = (0.0, 0.8, 0.0, 0.8)
SIZES = {"max_model_len": 64, "max_num_seqs": 4, "page_size": PAGE, "num_pages": 20, "prefill_chunk": 32}


def in_form(m: Model, form: str) -> Model:
    return Model(m.config, quantised(form, parameters(m.config), dict(m.params)))


def sampling(**options) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=20, seed=i, temperature=t, **options) for i, t in enumerate(TEMPERATURES)]


# A scale for all inputs and rounded activations; groups of inputs with zero points.
@cases("form", FORMS, quick=["int8_dynamic"], rest=["int4_asym", "fp8_block"])
def test_preempted_requests_and_known_beginnings_keep_their_tokens(form):
    dense = lively(tiny_models.model(CONFIG))
    draft = noisy(dense, 0.02)  # right more often than not
    spec, _ = speculation("noisy", K)
    engine = tiny_models.engine(in_form(dense, form), spec, in_form(draft, form), **SIZES)
    pages, expected, plain = engine.scheduler.allocator, [], sampling(num_speculative_tokens=0)
    for prompt, wanted in zip(PROMPTS, plain, strict=True):
        pages.reset()
        expected += texts(serve(engine, [prompt], [wanted]))
    assert engine.scheduler.num_preemptions == 0
    pages.reset()
    together = serve(engine, PROMPTS, sampling(), rounds=2)
    assert engine.scheduler.num_preemptions > 0, "the pool is too small for all"
    assert texts(together) == expected
    assert sum(r.metrics.num_accepted_tokens for r in together) > 0
    pages.reset()
    serve(engine, [LONG], plain[:1])
    assert len(pages.page_of) > len(PROMPTS[1][:18]) // PAGE
    assert texts(serve(engine, PROMPTS[1:2], plain[1:2])) == expected[1:2], "its beginning is known"


@cases("family", tiny_models.FAMILIES, rest=["gemma4", "muse_glimmer"])
@cases("form", ("int8", "int4_32"), rest=["int4_32"])
def test_tokens_of_each_family_are_those_of_the_numbers_that_the_form_holds(family, form):
    config, sizes = tiny_models.FAMILIES[family], {"width": 128, "mlp_width": 128}
    if own := config.per_layer:
        layers = tuple(dataclasses.replace(layer, mlp_width=128) for layer in own)
        sizes |= {"per_layer": layers, "layer_embed_width": 32}
    dense_model = lively(tiny_models.model(dataclasses.replace(config, **sizes)))
    held = in_form(dense_model, form)
    whole = Model(held.config, {name: dense(x) for name, x in held.params.items()})
    assert any((x != dense_model.params[name]).any() for name, x in whole.params.items())
    engines = [tiny_models.engine(one, speculation("ngram", K)[0], **SIZES) for one in (held, whole)]
    for engine in engines:
        engine.grown_shape = lambda *requests: (4, 16)  # one program for all numbers of rows
    found, expected = (texts(serve(engine, PROMPTS, sampling())) for engine in engines)
    assert found == expected
