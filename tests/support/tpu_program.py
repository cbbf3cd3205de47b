"""The device program as the engine sets it up, compiled by the real TPU compiler for chips that are not there."""

from __future__ import annotations

import dataclasses
import math
import re
import unittest.mock
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints import forms
from jaxspec.cache import budget
from jaxspec.cache.pages import PagedKVCache, shapes
from jaxspec.decode.state import DecodeConfig, Variant
from jaxspec.engine import assembly, batch, sizing
from jaxspec.engine.assembly import (
    cache_layouts,
    drafters,
    paged_models,
)
from jaxspec.engine.catalogue import AHEAD
from jaxspec.engine.request import Request
from jaxspec.hardware.chips import chips
from jaxspec.loading.quantised import sharding_of
from jaxspec.loading.weights import compute_dtype
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import abstract_params
from jaxspec.models.model import Model
from jaxspec.models.parameters import Parameter
from jaxspec.models.sharding import for_degree
from jaxspec.options.engine import EngineConfig
from jaxspec.options.quantization import FORMS
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.placement import make_placement
from jaxspec.runtime.packing import pack
from jaxspec.runtime.programs import FUNCTIONS, lower, lower_from_disk
from jaxspec.sampling.processors.grammar import pool_shape
from pallas_kernels.device import Device
from pallas_kernels.weights import Weight
from pallas_kernels.weights.grouped import Grouped
from tests.support import hlo
from tests.support.compilation_cache import no_compilation_cache
from tests.support.tpu_topology import tpu_mesh

LARGE = 1 << 20  # elements: a weight, not a norm
CLUSTERS = 16 * 2048  # elements: those of Gemma 4 E2B's assistant, of all rows, which a draft sorts


def first_layers(config: ModelConfig, count: int | None) -> ModelConfig:
    """The model, cut to so many layers."""
    layers = {"num_layers": count, "windows": config.windows[:count], "per_layer": config.per_layer[:count]}
    return dataclasses.replace(config, **layers) if count else config


def quantised(form: str | None, known: Mapping[str, Parameter]) -> dict[str, Any]:
    """Abstract parameters in a form of 8 or 4 bits, as `loading.quantised.quantised` makes real ones."""

    def abstract(p: Parameter) -> Any:
        if form is None or not p.is_quantised:
            return p
        kind = FORMS[form]
        weight = forms.abstract(kind, p.shape, p.dtype.name)
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(place, weight, sharding_of(kind, p))

    return {name: abstract(p) for name, p in known.items()}


class Program:
    """Static config, and shapes with shardings for every argument, for all devices of a topology ("v5e:2x2").

    Without `num_pages` the pool is the one that the engine would make on such a chip: compiling shows that it fits.
    `forms` names the quantised form of the weights of "target" and "draft".
    """

    device = Device("tpu")
    draft_dtype: str | None = None  # where it is another than the target's
    kept: Path | None = None  # where programs go through, and come from

    def __init__(
        self,
        chip: str,
        target: ModelConfig,
        draft: ModelConfig | None = None,
        variant: Variant = Variant(),
        *,
        num_drafts: int = 4,
        draft_degree: int | None = None,
        tree: Mapping[str, int] | None = None,
        forms: Mapping[str, str] = MappingProxyType({}),
        draft_kv_cache_dtype: str = "auto",
        **options: Any,
    ) -> None:
        devices = list(self.devices(chip))
        self.placement = make_placement(len(devices), devices, draft_size=draft_degree)
        configs = {"target": target} | ({"draft": draft} if draft else {})
        places = assembly.placements(configs, self.placement)
        configs = {name: for_degree(config, places[name].degree) for name, config in configs.items()}
        self.options = EngineConfig(tensor_parallel_size=len(devices), **options)
        dtypes = {"target": self.dtype, "draft": self.draft_dtype or self.dtype}
        known = {n: abstract_params(c, dtypes[n], places[n]) for n, c in configs.items()}
        self.models = {n: Model(c, quantised(forms.get(n), known[n])) for n, c in configs.items()}
        drafts = {"num_speculative_tokens": num_drafts, "kv_cache_dtype": draft_kv_cache_dtype} | dict(tree or {})
        self.speculative = SpeculativeConfig(model="draft" if draft else None, **drafts) if num_drafts else None
        num_drafts = self.speculative.num_speculative_tokens if self.speculative else 0
        self.params: dict[str, Any] = {name: dict(model.params) for name, model in self.models.items()}
        if variant.grammars:
            self.params["grammars"] = pool_shape(self.options.grammar_pool_mib, self.placement.sharding())
        paged = self.paged(self.options.num_pages) if self.options.num_pages else self.filling(self.memory(chip))
        self.layouts = cache_layouts(paged, self.dtype)
        drafter = drafters(self.speculative, paged)[num_drafts]
        reader = drafter if drafter and drafter.features_width else None
        self.config = DecodeConfig(paged["target"], drafter, variant, reader=reader)
        places = assembly.placements(self.layouts, self.placement)
        self.cache = PagedKVCache(**{name: shapes(layout, places[name]) for name, layout in self.layouts.items()})

    def devices(self, chip: str):
        return tpu_mesh(chip).devices.flat

    def memory(self, chip: str) -> int:
        """Bytes of each that programs may use."""
        return chips(chip).kind.programs_memory

    @property
    def dtype(self):
        return compute_dtype(self.options.dtype, self.device)

    def paged(self, num_pages: int):
        options = EngineConfig(**vars(self.options) | {"num_pages": num_pages})
        return paged_models(self.models, options, self.speculative, self.placement, self.device)

    def filling(self, memory: int):
        """With the pools that the engine would make."""
        weights = sum(map(per_device, jax.tree.leaves(self.params)))
        free = int(self.options.memory_utilization * memory) - weights - self.reserved
        layouts = cache_layouts(self.paged(num_pages=1), self.dtype)
        places, platform = assembly.placements(layouts, self.placement), self.device.platform
        degrees = {name: place.degree for name, place in places.items()}
        longest = self.options.max_model_len or self.models["target"].config.max_model_len
        needs = sizing.demand(layouts, self.options, self.speculative, longest, degrees, platform)
        num_pages, in_windows = budget.pools(free, needs)
        paged = self.paged(num_pages)
        layout = dataclasses.replace(paged["target"].layout, num_window_pages=in_windows)
        return paged | {"target": dataclasses.replace(paged["target"], layout=layout)}

    @property
    def reserved(self) -> int:
        """Bytes that the engine keeps for the programs' temporary memory."""
        return sizing.temporary_bytes(self.models, self.options, self.speculative, "tpu")

    @property
    def weights(self) -> set[int]:
        """Elements of the large parameters, whole and as one device holds them.

        The scales of groups are left out, because a product converts them to float32.
        """
        params = jax.tree.leaves(self.params, is_leaf=lambda x: isinstance(x, Weight))
        leaves = [leaf for x in params for leaf in jax.tree.leaves(x.values if isinstance(x, Grouped) else x)]
        sizes = [math.prod(shape) for x in leaves for shape in (x.shape, x.sharding.shard_shape(x.shape))]
        sizes += [x.size for x in params]
        return {size for size in sizes if size >= LARGE}

    @property
    def planes(self) -> set[int]:
        """Elements of the planes of matrices in groups, which a product reads a few groups at a time."""
        matrices = jax.tree.leaves(self.params, is_leaf=lambda x: isinstance(x, Weight))
        planes = [plane for x in matrices if isinstance(x, Grouped) for plane in x.values]
        return {math.prod(shape) for x in planes for shape in (x.shape, x.sharding.shard_shape(x.shape))}

    @property
    def pools(self) -> set[int]:
        """Elements of one layer's pages, likewise.

        The scales of pages in 8 bits, 1/32 of their bytes, are left out: where a tree's path is kept, the compiler
        brings them into VMEM.
        """
        leaves = [x for x in jax.tree.leaves(self.cache) if x.ndim == 4]
        return {math.prod(shape) for x in leaves for shape in (x.shape, x.sharding.shard_shape(x.shape))}

    def compile(self, name: str, *arrays: Any) -> Any:
        with jax.sharding.use_abstract_mesh(self.placement.mesh.abstract_mesh), no_compilation_cache():
            packed = pack(arrays)
            words = jax.ShapeDtypeStruct(packed.words.shape, jnp.int32, sharding=self.placement.sharding())
            packed = dataclasses.replace(packed, words=words)
            arguments = name, self.config, self.params, self.cache, packed
            if self.kept is None:
                return self.compiled(lower(*arguments))
            lower_from_disk(self.kept, "program", *arguments)[2]()  # as a first start does,
            with unittest.mock.patch.dict(FUNCTIONS, {name: None}):  # and a later one
                return self.compiled(lower_from_disk(self.kept, "program", *arguments)[0])

    def compiled(self, lowered: jax.stages.Lowered) -> Any:
        return lowered.compile()

    @property
    def row_pages(self) -> int:
        """N, that of the engine's last table width."""
        return -(-(self.config.target.max_model_len + self.num_drafts) // self.config.target.layout.page_size)

    @property
    def num_drafts(self) -> int:
        return self.config.num_speculative_tokens

    def requests(self, length: int) -> list[Request]:
        """As many as rows, prompts of so many tokens."""
        how = {"params": SamplingParams(), "seed": 0, "rule": "standard", "stop_ids": (), "num_speculative_tokens": 0}
        rows = range(self.options.max_num_seqs)
        return [Request(id=row, prompt=[0] * length, max_len=length + 1, **how) for row in rows]

    def launch(self) -> Any:
        requests, shape = self.requests(1), (self.options.max_num_seqs, self.row_pages)
        how = self.num_drafts, self.config.variant, self.config.target.layout, shape
        spare = self.options.max_num_seqs // AHEAD  # as in an engine's largest launch
        return self.compile("launch", batch.launch_input(requests, *how, spare=spare, num_rounds=1))

    def prefill(self) -> Any:
        shape = sizing.chunk_shape(self.options, "tpu")
        (request, *_) = self.requests(shape.rows * shape.width + 1)
        rows = batch.pieces([request], [0], shape)
        chunk = batch.chunk_input(rows, self.config.target.layout, shape, row_pages=self.row_pages)
        return self.compile("prefill", chunk)


def per_device(x: jax.ShapeDtypeStruct) -> int:
    """Bytes."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def check(program: Program, compiled: jax.stages.Compiled, temporary: int) -> hlo.Program:
    """In place, within `temporary` bytes a device, without the host, and no page or slice of a weight moved for
    nothing; -> the program."""
    memory, read = compiled.memory_analysis(), hlo.Program(compiled.as_text())
    places = assembly.placements(program.layouts, program.placement)
    stored = [x.pool_bytes(places[name].degree, "tpu") for name, x in program.layouts.items()]
    assert memory.alias_size_in_bytes == sum(stored)
    table = re.search(r"input_output_alias=\{(.*?)\}, entry", read.text).group(1)
    aliased = {int(out or 0): int(at) for out, at in re.findall(r"\{(\d*)\}: \((\d+), \{\}, ", table)}
    assert aliased == {i: aliased[0] + i for i in range(len(jax.tree.leaves(program.cache)))}
    assert memory.temp_size_in_bytes < temporary, f"{memory.temp_size_in_bytes / 1e6:.1f} MB"
    for instruction in ("infeed", "outfeed", "send", "recv"):
        assert not re.search(rf"\s{instruction}(-start|-done)?\(", read.text), instruction
    sorts = [i for part in read.computations.values() for i in part if i.opcode == "sort"]
    assert not [i.line for i in sorts if "/propose/" not in i.line or max(i.sizes) > CLUSTERS], "sorted"
    assert not hlo.made(read.all, program.pools, prefetched=False), "pages are copied"
    sliced = set(read.dynamic_slices(LARGE))
    if program.planes:  # a product slices them, and activations that may be as large
        sliced &= (program.weights | program.pools) - program.planes
    assert not sliced, "weights or pages are sliced"
    return read


def check_loop(program: Program, compiled: jax.stages.Compiled, temporary: int, but: int = 0) -> hlo.Program:
    """`check`, and in the loop each weight is read where it lies, but those of so many elements."""
    read = check(program, compiled, temporary)
    assert not hlo.made(read.loop, program.weights - {but}, prefetched=True), "weights are copied"
    return read
