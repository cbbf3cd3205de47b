"""What the compiled program is: one loop without the host, caches in place, one transfer a launch."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode.state import DecodeConfig, Variant
from jaxspec.drafters.base import Chunk
from jaxspec.engine import batch, runner
from jaxspec.engine.engine import Engine
from jaxspec.hardware.platforms import PLATFORMS
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.runtime.packing import pack
from jaxspec.runtime.programs import FUNCTIONS, lower
from pallas_kernels.device import Device
from tests.support import lively_models, tiny_models
from tests.support.compilation_cache import no_compilation_cache
from tests.support.sizes import cases

K = 3
VARIANTS = {
    "greedy": Variant(),
    "coupled": Variant(frozenset({"coupled"})),
    "everything": Variant(frozenset({"standard", "block", "coupled"}), filters=True),
}
# Shapes that no other array of the program has, so that an operand's shape names its model.
DRAFT = dataclasses.replace(
    tiny_models.BASE, num_layers=1, windows=(None,), width=24, num_kv_heads=1, num_heads=2, head_dim=8
)


@functools.cache
def make(method: str = "draft_model", num_pages: int = 48, **options) -> Engine:
    config = {"method": method, "num_speculative_tokens": K, "model": "x" if method == "draft_model" else None}
    draft = tiny_models.model(DRAFT, 1) if method == "draft_model" else None
    return tiny_models.engine(
        lively_models.target(), None if method == "plain" else config, draft,
        **lively_models.OPTIONS | {"num_pages": num_pages} | options,
    )  # fmt: skip


def arguments(engine: Engine):
    request = engine.add(lively_models.PROMPTS[3], SamplingParams(temperature=0.0, max_tokens=20))
    engine.scheduler.admit()
    used, drafts = batch.variant([request]), engine.num_drafts
    inputs = batch.launch_input([request], drafts, used, engine.layout, (2, 4), num_rounds=4)
    engine.abort(request)
    return jax.device_put(pack((inputs,)), engine.runner.placement.sharding())


def config(engine: Engine, variant: str) -> DecodeConfig:
    return dataclasses.replace(engine.runner.decoding, variant=VARIANTS[variant])


@functools.cache
def compiled(method: str, variant: str = "greedy", num_pages: int = 48) -> jax.stages.Compiled:
    engine = make(method, num_pages)
    with no_compilation_cache():
        lowered = lower("launch", config(engine, variant), engine.runner.params, engine.runner.cache, arguments(engine))
        return lowered.compile()


def cache_bytes(engine: Engine) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(engine.runner.cache))


@cases("variant", ["greedy", "everything"], quick=["greedy"])
@cases("method", ["draft_model", "ngram"], quick=["draft_model"])
def test_the_host_takes_no_part(method, variant):
    text = compiled(method, variant).as_text()
    assert " while(" in text
    for instruction in ("infeed", "outfeed", "send", "recv"):
        assert not re.search(rf"\s{instruction}(-start|-done)?\(", text), instruction
    assert not re.findall(r'custom_call_target="[^"]*(?:callback|python|host)[^"]*"', text, re.IGNORECASE)


@cases("method", ["plain", "draft_model", "ngram"], quick=["draft_model"])
def test_caches_are_updated_in_place(method):
    """Every leaf aliases, all bytes of it, and temporary memory knows nothing of the number of pages."""
    program, engine = compiled(method), make(method)
    leaves = jax.tree.leaves(engine.runner.cache)
    assert len(leaves) == {"plain": 2, "draft_model": 3, "ngram": 2}[method]
    table = re.search(r"input_output_alias=\{(.*?)\}, entry", program.as_text()).group(1)
    first = len(jax.tree.leaves(engine.runner.params))
    aliased = {int(out): int(at) for out, at in re.findall(r"\{(\d+)\}: \((\d+), \{\}, may-alias\)", table)}
    assert aliased == {i: first + i for i in range(len(leaves))}
    small, large = program.memory_analysis(), compiled(method, num_pages=16 * 48).memory_analysis()
    assert small.alias_size_in_bytes >= cache_bytes(engine)
    assert large.alias_size_in_bytes >= cache_bytes(make(method, 16 * 48)) == 16 * cache_bytes(engine)
    assert small.temp_size_in_bytes == large.temp_size_in_bytes < 300_000


@pytest.mark.thorough
def test_no_copy_of_the_cache_while_sampling():
    small, large = (compiled("draft_model", "everything", n).memory_analysis() for n in (48, 16 * 48))
    assert small.temp_size_in_bytes == large.temp_size_in_bytes


def equations(jaxpr):
    """All equations, those of called functions once a call, those of a loop as often as it runs, if that is known."""
    for equation in jaxpr.eqns:
        yield equation
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in times * [*equation.params.values()]:
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, jax.extend.core.ClosedJaxpr):
                    yield from equations(inner.jaxpr)
                elif isinstance(inner, jax.extend.core.Jaxpr):
                    yield from equations(inner)


def loop_body(engine: Engine, variant: str):
    """The body of the loop over rounds: the launch's one outermost while."""
    program = functools.partial(FUNCTIONS["launch"], config(engine, variant))
    jaxpr = jax.make_jaxpr(program)(engine.runner.params, engine.runner.cache, *arguments(engine).unpack())
    (loop,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "while"]
    return list(equations(loop.params["body_jaxpr"].jaxpr))


@cases("variant", VARIANTS, quick=["greedy", "everything"])
@cases("method", ["plain", "draft_model", "ngram"], quick=["draft_model"])
def test_a_round_is_k_draft_passes_and_one_verification(method, variant):
    engine = make(method)
    body = loop_body(engine, variant)
    pages = {name: getattr(engine.runner.cache, name) for name in ("target", "draft")}
    slots = {
        (x.shape[0] * x.shape[1], *x.shape[2:]): name for name, layers in pages.items() for x in jax.tree.leaves(layers)
    }
    passes, writes = collections.Counter(), collections.Counter()
    for equation in body:
        shape = getattr(equation.invars[0].aval, "shape", None) if equation.invars else None
        if equation.primitive.name == "gather" and shape in EMBEDDINGS:
            passes[EMBEDDINGS[shape]] += 1
        if equation.primitive.name == "scatter" and shape in slots:
            writes[slots[shape]] += 1
    drafts = K if method == "draft_model" else 0
    assert passes == collections.Counter(target=1, draft=drafts)
    assert writes == collections.Counter(target=2, draft=drafts)  # layers times passes


EMBEDDINGS = {(64, 32): "target", (64, 24): "draft"}


@cases("method", ["plain", "draft_model", "ngram"], quick=["draft_model"])
def test_no_sort_and_no_callback_in_the_loop(method):
    names = {equation.primitive.name for equation in loop_body(make(method), "everything")}
    assert "dot_general" in names
    assert not {n for n in names if "sort" in n or "top_k" in n or "callback" in n or "feed" in n}


class Sealed:
    """Stands for an array on the device. Whatever looks inside, or waits, raises."""

    def __init__(self, value) -> None:
        object.__setattr__(self, "_value", value)

    def refuse(self, *args, **kwargs):
        raise AssertionError("the host looked at a launch's result outside of fetch")

    def __getattribute__(self, name):
        if name in ("__class__", "__dict__"):  # isinstance may ask
            return object.__getattribute__(self, name)
        raise AssertionError(f"the host asked for .{name} of a launch's result outside of fetch")

    __array__ = __int__ = __index__ = __bool__ = __float__ = __len__ = __iter__ = __getitem__ = __eq__ = refuse
    __lt__ = __gt__ = __add__ = __sub__ = __hash__ = refuse


@pytest.mark.parametrize("rounds", [1, 16])
def test_one_transfer_a_launch(monkeypatch, rounds):
    engine = make()
    run, fetched, copies = engine.runner.programs.run, [], []

    def sealed_run(name, *args):
        if name != "launch":
            return run(name, *args)
        cache, result = run(name, *args)
        return cache, jax.tree.map(Sealed, result)

    def fetch(result):
        fetched.append(result)
        return real_fetch(jax.tree.map(lambda s: object.__getattribute__(s, "_value"), result))

    def device_get(tree):
        copies.append(tree)
        return real_device_get(tree)

    real_fetch, real_device_get = runner.fetch, jax.device_get
    monkeypatch.setattr(engine.runner.programs, "run", sealed_run)
    monkeypatch.setattr(runner, "fetch", fetch)
    monkeypatch.setattr(jax, "device_get", device_get)
    requests = [engine.add(p, s) for p, s in zip(lively_models.PROMPTS, lively_models.params(), strict=True)]
    steps = 0
    while engine.busy:
        engine.step(rounds)
        steps += 1
        assert len(fetched) == len(copies) == steps
    assert lively_models.texts(requests) == lively_models.plain(lively_models.PROMPTS, tuple(lively_models.params()))


def test_a_sealed_result_is_sealed():
    for look in (np.asarray, int, bool, list, lambda s: s.tolist(), lambda s: s.block_until_ready(), lambda s: s[0]):
        with pytest.raises(AssertionError, match="launch's result"):
            look(Sealed(jnp.zeros(3)))


def test_caches_are_donated():
    """The old buffers are gone, and the new ones lie where they lay."""
    engine = make()
    request = engine.add(lively_models.PROMPTS[4], SamplingParams(temperature=0.0, max_tokens=20))
    for _ in range(3):
        before = jax.tree.leaves(engine.runner.cache)
        where = [x.unsafe_buffer_pointer() for x in before]
        engine.step(1)
        assert all(x.is_deleted() for x in before)
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine.runner.cache)] == where
    engine.abort(request)


@pytest.mark.parametrize("device", [Device("gpu", (9, 0)), Device("tpu")], ids=["gpu", "tpu"])
@pytest.mark.parametrize(("kernels", "some"), [(None, True), ("pallas", True), ("reference", False)])
def test_kernels_are_where_they_are_asked_for(device, kernels, some):
    """In every program that computes."""
    engine = make(device=device, kernels=kernels)
    (launched,) = arguments(engine).unpack()
    chunk = Chunk(jnp.zeros((2, 16), jnp.int32), *[jnp.zeros(2, jnp.int32)] * 2, launched.block_table)
    arrays = {"launch": (launched,), "prefill": (chunk,), "catch_up": (chunk,)}
    assert {*arrays, "copy_pages", "write_grammar"} == FUNCTIONS.keys()
    for name, given in arrays.items():
        program = functools.partial(FUNCTIONS[name], config(engine, "greedy"))
        traced = jax.make_jaxpr(program)(engine.runner.params, engine.runner.cache, *given)
        assert ("pallas_call" in str(traced)) == some, name


def test_options_reach_the_compiler(monkeypatch):
    name = jax.default_backend()
    asking = dataclasses.replace(PLATFORMS[name], compiler_options={"no_such_option": 1})
    monkeypatch.setitem(PLATFORMS, name, asking)
    engine = make("plain")
    lowered = lower("launch", config(engine, "greedy"), engine.runner.params, engine.runner.cache, arguments(engine))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        lowered.compile()


def test_a_program_holds_no_lines_of_source():
    """Not its caller's, and not its own: libtpu may compare stacks of them without an end. The names stay."""
    engine = make("plain")
    option = jax.config.jax_traceback_in_locations_limit
    lowered = lower("launch", config(engine, "greedy"), engine.runner.params, engine.runner.cache, arguments(engine))
    text = lowered.as_text(debug_info=True)
    assert "while/body" in text
    assert ".py" not in text
    assert jax.config.jax_traceback_in_locations_limit == option != 0


@pytest.mark.thorough
@pytest.mark.usefixtures("exact_shapes")
def test_what_needs_no_other_program():
    """Seeds, temperatures, lengths within a bucket, rounds, limits, stop ids and K of a row are data."""
    engine = lively_models.new_engine("first_layer", K)
    serve = functools.partial(lively_models.serve, engine)
    first = SamplingParams(max_tokens=20, seed=1, temperature=0.8)
    serve([(1, 2, 3), (4, 5)], [first] * 2)
    known = engine.runner.programs.num_compiled
    assert known == 3  # a prefill, the draft's, and a launch
    cases = [
        SamplingParams(max_tokens=5, seed=2, temperature=1.7),
        SamplingParams(max_tokens=12, seed=2**63, stop_token_ids=[5, 6]),
        SamplingParams(max_tokens=2, seed=-4, num_speculative_tokens=1),
    ]
    for other in cases:
        for rounds in (1, 7, 32):
            serve([(1, 2, 3, 4, 5, 6, 7), (9, 8)], [first, other], rounds=rounds)
    assert engine.runner.programs.num_compiled == known
    serve([(1, 2)] * 3, [first] * 3)  # a wider batch is another shape
    assert engine.runner.programs.num_compiled == known + 2
    assert engine.timing.compile_seconds == pytest.approx(engine.runner.programs.compile_seconds)
