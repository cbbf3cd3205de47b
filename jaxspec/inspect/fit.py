"""Whether a target and its draft fit on chips that need not be here: bytes on each device, from shapes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxspec.cache.pages import cache_layout, features_layout
from jaxspec.common.errors import UserError
from jaxspec.engine.setup import temporary_bytes
from jaxspec.hardware.accelerators import KNOWN
from jaxspec.hardware.chips import Chips
from jaxspec.hardware.platforms import facts
from jaxspec.loading.weights import compute_dtype
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import abstract_params
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.model import Model
from jaxspec.models.sharding import check_divides, for_degree
from jaxspec.options.engine import EngineConfig
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.placement import absent, check_draft_size


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is to fit where. Options as `EngineConfig` and `SpeculativeConfig` have them.

    tensor_parallel_size: None for all chips.
    num_speculative_tokens: None for the default beside a draft, and for no speculation without one.
    """

    target: ModelConfig
    draft: ModelConfig | None
    chips: Chips
    tensor_parallel_size: int | None = None
    draft_tensor_parallel_size: int = 1
    dtype: str = "auto"
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
    """Bytes are those of one device; pages are of all models together.

    memory: what the engine uses of a device's; free: what weights and temporary memory leave of it, below 0 where they
    take more.
    tokens: of context, of all rows together; longest_context: of a row that is alone.
    rows: of max_model_len tokens, that the pages hold at once.
    problems: why it does not work, in words; none where it does.
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
    pages: int
    tokens: int
    longest_context: int
    rows: int
    problems: tuple[str, ...]


def fit(asked: Asked) -> Fit:
    """Raises: UserError for what no engine can be made with, whatever its memory: a degree that does not divide what it
    cuts, an option out of its range."""
    options = EngineConfig(
        tensor_parallel_size=asked.degree,
        dtype=asked.dtype,
        max_model_len=asked.max_model_len,
        max_num_seqs=asked.max_num_seqs,
    )
    if asked.longest > asked.target.max_model_len:
        raise UserError(f"max_model_len={asked.longest} exceeds the model's own {asked.target.max_model_len}: lower it")
    check_degrees(asked)
    kind, speculative = asked.chips.kind, asked.speculative
    platform, dtype = facts(kind.platform), compute_dtype(asked.dtype, kind.device)
    cuts = {"target": asked.degree, "draft": asked.draft_tensor_parallel_size}
    given = {"target": asked.target} | ({"draft": asked.draft} if asked.draft else {})
    configs = {name: for_degree(config, cuts[name]) for name, config in given.items()}
    weights = {name: weight_bytes(config, dtype, cuts[name]) for name, config in configs.items()}
    page = {name: page_bytes(config, dtype, cuts[name], kind.platform) for name, config in configs.items()}
    width = draft_spec(asked.draft).features_width if asked.draft else 0
    layout = features_layout(width, page_size=platform.page_size, num_pages=1, dtype=dtype)
    features = layout.stored_bytes(cuts["draft"], kind.platform)
    models = {name: Model(config, {}) for name, config in configs.items()}
    temporary = temporary_bytes(models, options, speculative, kind.platform)
    memory = int(kind.programs_memory * options.memory_utilization)
    free = memory - temporary - sum(weights.values())
    all_pages = sum(page.values()) + features
    pages = max(free, 0) // all_pages
    # A row holds its drafts, too, until they are verified.
    drafts = speculative.num_speculative_tokens if speculative else 0
    row = -(-(asked.longest + drafts) // platform.page_size)
    need = memory - free + row * all_pages
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
        features_page=features,
        pages=pages,
        tokens=pages * platform.page_size,
        longest_context=min(max(pages * platform.page_size - drafts, 0), asked.target.max_model_len),
        rows=pages // row,
        problems=(lacks,) if pages < row else (),
    )


def weight_bytes(config: ModelConfig, dtype: Any, degree: int) -> int:
    """Of a model's own parameters, on each of so many devices."""
    own = [p for p in abstract_params(config, dtype, absent(degree)).values() if not p.borrowed]
    return sum(math.prod(p.sharding.shard_shape(p.shape)) * p.dtype.itemsize for p in own)


def page_bytes(config: ModelConfig, dtype: Any, degree: int, platform: str) -> int:
    """Of a page of all layers, on each of so many devices."""
    layout = cache_layout(config, page_size=facts(platform).page_size, num_pages=1, dtype=dtype, platform=platform)
    return layout.stored_bytes(degree, platform)


def check_degrees(asked: Asked) -> None:
    """Raises UserError naming a degree that does not work, and those that do."""
    if asked.degree > asked.chips.count:
        raise UserError(
            f"tensor_parallel_size={asked.degree} needs that many devices, {asked.chips.name} has {asked.chips.count}: "
            "lower it"
        )
    check_divides(asked.target, asked.degree, most=asked.chips.count)
    if asked.draft is not None:
        # A draft of smaller degree is cut over the first axis of the target's mesh.
        degree = asked.draft_tensor_parallel_size
        check_draft_size(degree, asked.degree)
        check_divides(asked.draft, degree, most=asked.degree, of_draft=True)


def document(asked: Asked) -> dict[str, Any]:
    """All of it, for JSON: "chips", the options, "fit" (see `Fit`), whether it "fits", else what "would_fit"."""
    found, kind = fit(asked), asked.chips.kind
    chips = {"name": asked.chips.name, "devices": asked.chips.count, "hosts": -(-asked.chips.count // kind.host)}
    chips |= {"platform": kind.platform, "memory_bytes": kind.memory, "bandwidth_bytes_per_second": kind.bandwidth}
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


def remedies(asked: Asked, found: Fit) -> list[str]:
    """The options by which it would work, each by itself; the least of each kind."""

    def works(changes: dict[str, Any]) -> bool:
        try:
            return not fit(dataclasses.replace(asked, **changes)).problems
        except UserError:  # a degree that does not divide
            return False

    tried = [next((words for words, changes in kind if works(changes)), None) for kind in changes(asked, found)]
    return [words for words in tried if words]


def changes(asked: Asked, found: Fit) -> Iterator[Iterable[tuple[str, dict[str, Any]]]]:
    """Kinds of remedies: each of (what to say, what to change), the least change first."""
    have = asked.chips

    def numbers(name: str, values: Iterable[int]) -> Iterable[tuple[str, dict[str, Any]]]:
        return ((f"--{name.replace('_', '-')} {value}", {name: value}) for value in values)

    def other(kinds: Iterable[Chips]) -> Iterable[tuple[str, dict[str, Any]]]:
        return ((f"--chips {c.name}", {"chips": c, "tensor_parallel_size": c.count}) for c in kinds)

    if found.dtype == "float32" and not have.kind.device.lacks_bfloat16:
        yield [("--dtype bfloat16", {"dtype": "bfloat16"})]
    yield numbers("max_model_len", [found.longest_context] if 0 < found.longest_context < asked.longest else [])
    yield numbers("max_num_seqs", (asked.max_num_seqs >> i for i in range(1, asked.max_num_seqs.bit_length())))
    if asked.draft is not None:
        yield numbers("draft_tensor_parallel_size", range(asked.draft_tensor_parallel_size + 1, have.count + 1))
    yield numbers("tensor_parallel_size", range(asked.degree + 1, have.count + 1))
    yield numbers("tensor_parallel_size", range(asked.degree - 1, 0, -1))
    yield other(Chips(have.kind, n) for n in range(have.count + 1, 4 * max(have.count, have.kind.host) + 1))
    larger = [kind for kind in KNOWN if kind.platform == have.kind.platform and kind.memory > have.kind.memory]
    larger.sort(key=lambda kind: (kind.memory, -kind.bandwidth))
    yield other(Chips(kind, have.count) for kind in larger)
