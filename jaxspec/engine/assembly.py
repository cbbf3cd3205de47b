"""Functions that make the parts of an engine: models with their page layouts, the number of pages, drafters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.cache import budget
from jaxspec.cache.pages import CacheLayout, features_layout
from jaxspec.common.errors import UnsupportedError, UserError, quoted
from jaxspec.drafters import methods
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.combined import Combined
from jaxspec.drafters.trees.growth import Shape, Tree
from jaxspec.engine import sizing
from jaxspec.engine.catalogue import ClosedCatalogue, OpenCatalogue
from jaxspec.hardware.platforms import facts
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import weight_bytes
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.model import Model
from jaxspec.models.paged import PagedModel, cache_layout
from jaxspec.models.sharding import check_divides
from jaxspec.options.engine import EngineConfig
from jaxspec.options.kv_cache import KV_CACHE_DTYPES
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.placement import Placement
from pallas_kernels.device import Device
from pallas_kernels.paged_attention import OP as PAGED_ATTENTION

Speculation = SpeculativeConfig | None


def paged_models(
    models: dict[str, Model], config: EngineConfig, speculative: Speculation, placement: Placement, device: Device
) -> dict[str, PagedModel]:
    """Return the target and the draft as models over paged KV caches of the same number of pages.

    Raises UserError for options that do not fit the models or the memory.
    """
    own = models["target"].config.max_model_len
    longest = config.max_model_len or own
    if longest > own:
        raise UserError(f"max_model_len={longest} exceeds the model's own {own}: lower it")
    places = placements(models, placement)
    for name, model in models.items():
        check_divides(model.config, places[name].degree, of_draft=name == "draft")
        if any(layer.num_kv_heads % places[name].degree for layer in model.config.layers):
            raise RuntimeError(f"the {name} was loaded for fewer than {places[name].degree} devices")
    within = {name: context(name, model.config, speculative, longest) for name, model in models.items()}
    layouts = page_layouts(models, config, speculative, places, device.platform, longest)
    if "draft" in layouts and not layouts["draft"].by_position:
        raise UnsupportedError("the draft has layers with a state of the whole row: a draft needs keys and values")
    return {
        name: PagedModel(
            model.config.within(within[name]),
            layouts[name],
            within[name],
            Backend(device, places[name], config.kernels),
        )
        for name, model in models.items()
    }


def placements(names: Iterable[str], placement: Placement) -> dict[str, Placement]:
    """Return the placement over devices of each named part of the cache: "target", "draft", "features".

    Features (hidden states of the target, kept for a draft head) are placed like the draft, which reads them.
    """
    return {name: placement if name == "target" else placement.draft for name in names}


def context(name: str, model: ModelConfig, speculative: Speculation, longest: int) -> int:
    """Return the maximum number of positions of the target or the draft. longest: the engine's max_model_len."""
    own = speculative.max_model_len if name == "draft" and speculative else None
    return min(longest, own or model.max_model_len, model.max_model_len)


def page_layouts(
    models: dict[str, Model],
    config: EngineConfig,
    speculative: Speculation,
    places: Mapping[str, Placement],
    platform: str,
    longest: int,
) -> dict[str, CacheLayout]:
    """Return the page layout of each model's cache.

    The number of pages is config.num_pages. If that is not given, it is as many pages as the rows can use and free
    memory holds.

    longest: maximum number of tokens of a row.
    """
    page_size = config.page_size or facts(platform).page_size

    def layout_of(name: str, model: Model) -> CacheLayout:
        own = speculative if name == "draft" and speculative else config
        how = {"dtype": model.dtype, "platform": platform, "kv_dtype": KV_CACHE_DTYPES[own.kv_cache_dtype]}
        return cache_layout(model.config, page_size=page_size, num_pages=1, **how)

    layouts = {name: layout_of(name, model) for name, model in models.items()}
    every = dict(layouts)
    if width := features_width(models):
        every["features"] = features_layout(width, page_size=page_size, num_pages=1, dtype=models["target"].dtype)
    degrees = {name: places["target" if name == "target" else "draft"].degree for name in every}
    demand = sizing.demand(every, config, speculative, longest, degrees, platform)
    if config.num_pages is None:
        temporary = sizing.temporary_bytes(models, config, speculative, platform)
        memory = budget.free_memory(places["target"].first_device, config.memory_utilization, temporary)
        num_pages, num_window_pages = budget.pools(budget.least_of_all(memory), demand)
        num_pages = min(num_pages, demand.used)
    else:
        num_pages, num_window_pages = budget.given(config.num_pages, demand)
    sized = {name: dataclasses.replace(layout, num_pages=num_pages) for name, layout in layouts.items()}
    return sized | {"target": dataclasses.replace(sized["target"], num_window_pages=num_window_pages)}


def features_width(models: Mapping[str, Model] | Mapping[str, PagedModel]) -> int:
    """Return M, the width of the target's features that are kept at each position for the draft; 0 if none are."""
    return draft_spec(models["draft"].config).features_width if "draft" in models else 0


def cache_layouts(paged: Mapping[str, PagedModel], dtype: Any) -> dict[str, CacheLayout]:
    """Return the layout of each part of the PagedKVCache, by name. dtype: dtype of the target's features."""
    layouts = {name: model.layout for name, model in paged.items()}
    if width := features_width(paged):
        target = paged["target"].layout
        sizes = {"page_size": target.page_size, "num_pages": target.num_pages}
        layouts["features"] = features_layout(width, **sizes, dtype=dtype)
    return layouts


def table_widths(device: Device, kernels: str | None, most: int, page_size: int) -> tuple[int, ...]:
    """Return the widths N, in pages, of block tables; the last has room for `most` pages.

    Each width needs compiled programs of its own.

    The cost of attention depends on the number of tokens of the rows, not on the width of the table. But the GPU kernel
    is faster if the table is so narrow that the kernel does not split the keys of a row.
    """
    few = facts(device.platform).short_row // page_size
    has_kernel = PAGED_ATTENTION.choose(kernels, device).name != "reference"
    return (few, most) if has_kernel and 0 < few < most else (most,)


def catalogue(
    config: EngineConfig, speculative: Speculation, device: Device, longest: int, *, lags: bool
) -> OpenCatalogue:
    """Return the catalogue of compiled programs, which chooses the program for each batch.

    longest: maximum number of positions of a row.
    lags: whether the draft has a KV cache, which may have fewer valid positions than the target's.
    """
    page_size = config.page_size or facts(device.platform).page_size
    most = -(-longest // page_size)
    widths = table_widths(device, config.kernels, most, page_size)
    if not config.warm_up:
        return OpenCatalogue(widths, config.max_num_seqs)
    return ClosedCatalogue(
        ks(speculative),
        speculative.rejection_sample_method if speculative else None,
        max_num_seqs=config.max_num_seqs,
        table_widths=widths,
        chunk=sizing.chunk_shape(config, device.platform),
        catches_up=lags,
        grammars=config.grammar_pool_mib > 0,
    )


def drafters(speculative: Speculation, models: Mapping[str, PagedModel]) -> dict[int, Drafter | None]:
    """Return the drafters by K, the number of draft tokens a round, for which programs are compiled; None for K = 0."""
    return {k: drafter(speculative, models, k) if k and speculative else None for k in ks(speculative)}


def ks(speculative: Speculation) -> tuple[int, ...]:
    """Return the values of K that programs are compiled for: 0, num_speculative_tokens, and half of it."""
    full = speculative.num_speculative_tokens if speculative else 0
    return tuple(sorted({0, full // 2, full}))


def drafter(speculative: SpeculativeConfig, models: Mapping[str, PagedModel], k: int) -> Drafter:
    """Return the drafter that proposes k tokens a round. Raise UserError if its method cannot use the draft model."""
    if speculative.drafter is not None:
        return with_drafts(speculative.drafter, k)
    own = own_method(models)
    looks_up, method = method_of(speculative, models)
    if methods.METHODS[method].parameters and method != own:
        found = f"a checkpoint of method {own!r}" if own else "none"
        raise UserError(f"method={method!r} needs a checkpoint of such a draft, {found} is given")
    most = speculative.tree_depth or max(speculative.num_speculative_tokens, k)
    limit = draft_spec(models["draft"].config).max_drafts if "draft" in models else None
    if limit is not None and most > limit:
        asked = "tree_depth" if speculative.tree else "num_speculative_tokens"
        raise UserError(f"{asked}={most}, but the draft proposes at most {limit} a round: lower it")
    if speculative.tree:
        return tree(speculative, models, methods.implementation(method), k)

    def make(name: str) -> Any:
        return methods.implementation(name).drafter(k, most, models, speculative)

    return Combined(k, make("ngram"), make(method)) if looks_up else make(method)


def own_method(models: Mapping[str, PagedModel]) -> str | None:
    """Return the name of the drafting method that the draft's checkpoint is for; None without a draft."""
    return draft_spec(models["draft"].config).method if "draft" in models else None


def method_of(speculative: SpeculativeConfig, models: Mapping[str, PagedModel]) -> tuple[bool, str]:
    """Return whether prompt lookup comes first, and the name of the drafting method without lookup.

    For a drafter that is given as an object, the name is that of its class.
    """
    if speculative.drafter is not None:
        return False, type(speculative.drafter).__name__
    return methods.split(speculative.method or own_method(models) or "draft_model")


def with_drafts(given: Any, k: int) -> Drafter:
    """Return the drafter that the caller gave, set to k tokens a round.

    Raises UserError if the object is not a `Drafter`, or is no frozen dataclass of hashable fields.
    """
    if not isinstance(given, Drafter):
        raise UserError(f"drafter={quoted(given)} must be a jaxspec.drafters.base.Drafter")
    try:
        hash(given)
        return dataclasses.replace(given, num_speculative_tokens=k)
    except TypeError as error:
        needed = "must be a frozen dataclass of hashable fields (its arrays come from parameters())"
        raise UserError(f"drafter={quoted(given)} {needed}: {error}") from None


def tree(speculative: SpeculativeConfig, models: Mapping[str, PagedModel], method: Any, k: int) -> Tree:
    """Return a drafter that proposes trees of k draft tokens, grown with the method's drafter of chains.

    method: module of the drafting method.

    Raises UserError or UnsupportedError if the method or the target cannot use such trees.
    """
    spec: Any = speculative
    depth = spec.tree_depth
    choices = spec.tree_choices or ()
    if any(layer.window is not None and layer.window <= depth for layer in models["target"].config.layers):
        raise UserError(f"tree_depth={depth} reaches beyond a sliding window of the target: lower it")
    if not models["target"].layout.by_position:
        raise UnsupportedError("the target has layers with a state of the whole row: propose chains, no trees")
    draft = method.drafter(depth, depth, models, speculative)
    if choices and not draft.independent:
        raise UserError(
            f"tree_choices needs a drafter that proposes all places at once, {method.__name__.split('.')[-1]!r} does "
            "not: give tree_width, tree_depth and tree_nodes"
        )
    return Tree(k, draft, Shape(spec.tree_width, depth, k, choices[:k]))


def draft_cost(models: dict[str, Model]) -> float:
    """Return an upper estimate of the time of one draft step, divided by the time of one target pass.

    The estimate is the ratio of the weights' bytes, but at least 0.5: a small model is slower than its bytes suggest.
    It is 0 without a draft model or head.
    """
    if "draft" not in models:
        return 0.0
    size = {name: weight_bytes(model.config, model.params) for name, model in models.items()}
    return max(0.5, size["draft"] / size["target"])
