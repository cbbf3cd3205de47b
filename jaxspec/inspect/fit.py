"""Computation of the memory that a target and its draft need on given accelerators, from shapes alone.

The accelerators need not be present. All numbers of bytes are those of one device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxspec.cache import budget
from jaxspec.cache.pages import CacheLayout, features_layout
from jaxspec.common.errors import UserError
from jaxspec.engine.sizing import demand, temporary_bytes
from jaxspec.hardware.accelerators import KNOWN
from jaxspec.hardware.chips import Chips
from jaxspec.hardware.platforms import facts
from jaxspec.loading.quantised import StoredForms, bytes_per_device, check_has_head
from jaxspec.loading.weights import compute_dtype
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import abstract_params
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.model import Model
from jaxspec.models.paged import cache_layout
from jaxspec.models.sharding import check_divides, for_degree
from jaxspec.options.engine import EngineConfig
from jaxspec.options.kv_cache import KV_CACHE_DTYPES, check_kv_cache_dtype
from jaxspec.options.quantization import check_quantization
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.placement import absent, check_draft_size


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The models, accelerators and options for which `fit` computes the memory.

    The options have the meaning that they have in `EngineConfig` and `SpeculativeConfig`.

    target, draft: configurations of the models; draft is None without a draft model.
    chips: accelerators.
    tensor_parallel_size: None for the number of chips.
    quantization, draft_quantization: forms of the weights of target and draft; None for the compute dtype.
    kv_cache_dtype, draft_kv_cache_dtype: forms of the keys and values of target and draft.
    stored, draft_stored: functions from the declarations of a model's parameters to the forms of those that its
      checkpoint holds in 8 bits (`jaxspec.loading.quantised.stored_forms`); None for a checkpoint that holds none.
    num_speculative_tokens: None for the default if there is a draft, and for no speculation if there is none.
    """

    target: ModelConfig
    draft: ModelConfig | None
    chips: Chips
    tensor_parallel_size: int | None = None
    draft_tensor_parallel_size: int = 1
    dtype: str = "auto"
    quantization: str | None = None
    draft_quantization: str | None = None
    kv_cache_dtype: str = "auto"
    draft_kv_cache_dtype: str = "auto"
    stored: StoredForms | None = None
    draft_stored: StoredForms | None = None
    max_model_len: int | None = None
    max_num_seqs: int = EngineConfig.max_num_seqs
    num_speculative_tokens: int | None = None

    @property
    def degree(self) -> int:
        return self.chips.count if self.tensor_parallel_size is None else self.tensor_parallel_size

    @property
    def speculative(self) -> SpeculativeConfig | None:
        k = self.num_speculative_tokens
        if self.draft is None and k is None:
            return None
        k = SpeculativeConfig.num_speculative_tokens if k is None else k
        return SpeculativeConfig(model="draft" if self.draft else None, num_speculative_tokens=k)

    @property
    def longest(self) -> int:
        return self.target.max_model_len if self.max_model_len is None else self.max_model_len


@dataclasses.dataclass(frozen=True)
class Fit:
    """The memory that models need on accelerators, and the number of pages that fit beside them.

    All numbers of bytes are those of one device. A page holds the cache entries of page_size tokens in every cache.

    dtype: dtype of computation and caches.
    memory: bytes that the engine may use.
    target_weights, draft_weights: bytes of each model's weights.
    temporary: bytes that programs need while they run.
    free: bytes left for pages; negative if weights and temporary memory exceed `memory`.
    page_size: tokens per page.
    target_page, draft_page, features_page: bytes of a page in the target's and the draft's KV cache, and in the cache
      of the target's features.
    window_page: part of target_page in layers with a window; 0 if there are none, or if a window holds a whole row.
    window_pages: number of pages in these layers; None if they have as many as all other layers.
    pages: number of pages that fit.
    tokens: number of context tokens that fit, over all rows.
    longest_context: number of context tokens that fit if there is only one row, at most the model's own maximum.
    rows: number of rows of max_model_len tokens that fit at once; with window_pages at most max_num_seqs.
    problems: reasons why the models do not fit; empty if they fit.
    """

    dtype: str
    memory: int
    target_weights: int
    draft_weights: int
    temporary: int
    free: int
    page_size: int
    target_page: int
    draft_page: int
    features_page: int
    window_page: int
    window_pages: int | None
    pages: int
    tokens: int
    longest_context: int
    rows: int
    problems: tuple[str, ...]


def fit(asked: Wanted) -> Fit:
    """Compute the memory that models need on accelerators, and the number of pages that fit beside them.

    Raises: UserError for options that are invalid whatever the memory, for example a degree that does not divide the
    model's heads.
    """
    options = EngineConfig(
        tensor_parallel_size=asked.degree,
        dtype=asked.dtype,
        quantization=asked.quantization,
        kv_cache_dtype=asked.kv_cache_dtype,
        max_model_len=asked.max_model_len,
        max_num_seqs=asked.max_num_seqs,
    )
    if asked.longest > asked.target.max_model_len:
        raise UserError(f"max_model_len={asked.longest} exceeds the model's own {asked.target.max_model_len}: lower it")
    check_degrees(asked)
    kind = asked.chips.kind
    platform = facts(kind.platform)
    speculative = asked.speculative
    dtype = compute_dtype(asked.dtype, kind.device)
    degrees = {"target": asked.degree}
    configs = {"target": for_degree(asked.target, asked.degree)}
    if asked.draft:
        degrees["draft"] = asked.draft_tensor_parallel_size
        configs["draft"] = for_degree(asked.draft, asked.draft_tensor_parallel_size)
    check_quantization("draft_quantization", asked.draft_quantization)
    forms = {"target": (asked.quantization, asked.stored), "draft": (asked.draft_quantization, asked.draft_stored)}
    for name, config in configs.items():
        check_has_head(f"the {name}", config, forms[name][0])
    weights = {name: weight_bytes(config, dtype, degrees[name], *forms[name]) for name, config in configs.items()}
    check_kv_cache_dtype("draft_kv_cache_dtype", asked.draft_kv_cache_dtype)
    caches = {"target": asked.kv_cache_dtype, "draft": asked.draft_kv_cache_dtype}
    layouts = {name: kv_layout(config, dtype, kind.platform, caches[name]) for name, config in configs.items()}
    width = draft_spec(asked.draft).features_width if asked.draft else 0
    layouts["features"] = features_layout(width, page_size=platform.page_size, num_pages=1, dtype=dtype)
    degrees["features"] = asked.draft_tensor_parallel_size
    needs = demand(layouts, options, speculative, asked.longest, degrees, kind.platform)
    page = dict(zip(layouts, needs.page_bytes, strict=True))
    temporary = temporary_bytes({n: Model(c, {}) for n, c in configs.items()}, options, speculative, kind.platform)
    memory = int(kind.programs_memory * options.memory_utilization)
    free = memory - temporary - sum(weights.values())
    all_pages, windows = sum(needs.page_bytes), needs.windows
    pages, window_pages = budget.pools(free, needs) if free >= all_pages else (0, None)
    # A row's pages also hold the row's draft tokens of one round, until they are verified.
    drafts = speculative.num_speculative_tokens if speculative else 0
    pages_per_row = math.ceil((asked.longest + drafts) / platform.page_size)
    saved = max(pages_per_row - windows.needed, 0) * windows.page_bytes if windows else 0
    need = memory - free + pages_per_row * all_pages - saved
    lacks = (
        f"{need / 1e9:.2f} GB a device are needed for a row of {asked.longest} tokens, {memory / 1e9:.2f} GB are there"
    )
    return Fit(
        dtype=dtype.name,
        memory=memory,
        target_weights=weights["target"],
        draft_weights=weights.get("draft", 0),
        temporary=temporary,
        free=free,
        page_size=platform.page_size,
        target_page=page["target"],
        draft_page=page.get("draft", 0),
        features_page=page["features"],
        window_page=windows.page_bytes if windows else 0,
        window_pages=window_pages,
        pages=pages,
        tokens=pages * platform.page_size,
        longest_context=min(max(pages * platform.page_size - drafts, 0), asked.target.max_model_len),
        rows=min(pages // pages_per_row, pages if window_pages is None else asked.max_num_seqs),
        problems=(lacks,) if pages < pages_per_row else (),
    )


def weight_bytes(
    config: ModelConfig, dtype: Any, degree: int, quantization: str | None = None, stored: StoredForms | None = None
) -> int:
    """Return the bytes of a model's own parameters on each of `degree` devices.

    The parameters that a draft shares with its target do not count.

    quantization, stored: as in `Wanted`.
    """
    own = {name: p for name, p in abstract_params(config, dtype, absent(degree)).items() if not p.from_target}
    found = stored(own) if stored else None
    return sum(bytes_per_device(quantization, name, p, found) for name, p in own.items())


def page_bytes(config: ModelConfig, dtype: Any, degree: int, platform: str, kv_cache_dtype: str = "auto") -> int:
    """Return the bytes of a page of a model's KV cache, over all layers, on each of `degree` devices."""
    return kv_layout(config, dtype, platform, kv_cache_dtype).stored_bytes(degree, platform)


def kv_layout(config: ModelConfig, dtype: Any, platform: str, kv_cache_dtype: str) -> CacheLayout:
    """Return the layout of a KV cache of one page."""
    how = {"dtype": dtype, "platform": platform, "kv_dtype": KV_CACHE_DTYPES[kv_cache_dtype]}
    return cache_layout(config, page_size=facts(platform).page_size, num_pages=1, **how)


def check_degrees(asked: Wanted) -> None:
    """Raise UserError for a degree of tensor parallelism that the models or the chips do not allow."""
    if asked.degree > asked.chips.count:
        raise UserError(
            f"tensor_parallel_size={asked.degree} needs that many devices, {asked.chips.name} has {asked.chips.count}: "
            "lower it"
        )
    check_divides(asked.target, asked.degree, most=asked.chips.count)
    if asked.draft is not None:
        # A draft is sharded over the first axis of the target's mesh, so its degree must divide the target's.
        degree = asked.draft_tensor_parallel_size
        check_draft_size(degree, asked.degree)
        check_divides(asked.draft, degree, most=asked.degree, of_draft=True)


def document(asked: Wanted) -> dict[str, Any]:
    """Return the accelerators, the options and the result of `fit` as a dict for JSON.

    Its keys are "chips", the options, "fit" (the fields of `Fit`), "fits" (a bool), and "would_fit" (the `remedies`).
    """
    found = fit(asked)
    kind = asked.chips.kind
    chips = {
        "name": asked.chips.name,
        "devices": asked.chips.count,
        "hosts": math.ceil(asked.chips.count / kind.host),
        "platform": kind.platform,
        "memory_bytes": kind.memory,
        "bandwidth_bytes_per_second": kind.bandwidth,
    }
    speculative = asked.speculative
    return {
        "chips": chips,
        "tensor_parallel_size": asked.degree,
        "draft_tensor_parallel_size": asked.draft_tensor_parallel_size if asked.draft else None,
        "max_model_len": asked.longest,
        "max_num_seqs": asked.max_num_seqs,
        "num_speculative_tokens": speculative.num_speculative_tokens if speculative else 0,
        "fit": dataclasses.asdict(found),
        "fits": not found.problems,
        "would_fit": remedies(asked, found) if found.problems else [],
    }


def remedies(asked: Wanted, found: Fit) -> list[str]:
    """Return the options, such as "--dtype bfloat16", each of which alone would make the models fit.

    Of each kind of change only the smallest that suffices is returned.

    found: result of `fit` for `asked`.
    """

    def works(changes: dict[str, Any]) -> bool:
        try:
            return not fit(dataclasses.replace(asked, **changes)).problems
        except UserError:  # raised for example for a degree that does not divide the model's heads
            return False

    working = []
    for kind in candidates(asked, found):
        for words, changes in kind:
            if works(changes):
                working.append(words)
                break
    return working


def candidates(asked: Wanted, found: Fit) -> Iterator[Iterable[tuple[str, dict[str, Any]]]]:
    """Yield kinds of option changes. Each kind is a series of (option as text, fields of `Wanted` with new values).

    The smallest change of a kind comes first.
    """
    have = asked.chips

    def numbers(name: str, values: Iterable[int]) -> Iterable[tuple[str, dict[str, Any]]]:
        return ((f"--{name.replace('_', '-')} {value}", {name: value}) for value in values)

    def other(kinds: Iterable[Chips]) -> Iterable[tuple[str, dict[str, Any]]]:
        return ((f"--chips {c.name}", {"chips": c, "tensor_parallel_size": c.count}) for c in kinds)

    if found.dtype == "float32" and not have.kind.device.lacks_bfloat16:
        yield [("--dtype bfloat16", {"dtype": "bfloat16"})]
    yield numbers("max_model_len", [found.longest_context] if 0 < found.longest_context < asked.longest else [])
    yield numbers("max_num_seqs", (asked.max_num_seqs >> i for i in range(1, asked.max_num_seqs.bit_length())))
    if asked.quantization is None and asked.stored is None:
        yield [("--quantization int8", {"quantization": "int8"})]
    if asked.kv_cache_dtype == "auto":
        yield [("--kv-cache-dtype int8", {"kv_cache_dtype": "int8"})]
    if asked.draft is not None:
        yield numbers("draft_tensor_parallel_size", range(asked.draft_tensor_parallel_size + 1, have.count + 1))
    yield numbers("tensor_parallel_size", range(asked.degree + 1, have.count + 1))
    yield numbers("tensor_parallel_size", range(asked.degree - 1, 0, -1))
    yield other(Chips(have.kind, n) for n in range(have.count + 1, 4 * max(have.count, have.kind.host) + 1))
    larger = [kind for kind in KNOWN if kind.platform == have.kind.platform and kind.memory > have.kind.memory]
    larger.sort(key=lambda kind: (kind.memory, -kind.bandwidth))
    yield other(Chips(kind, have.count) for kind in larger)
