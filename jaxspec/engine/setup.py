"""What an engine is made of: models with their page layouts, the size of the pool, drafters."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh

from jaxspec.cache import budget
from jaxspec.cache.pages import CacheLayout, cache_layout
from jaxspec.config import EngineConfig, SpeculativeConfig
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.combined import Combined
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.ngram import NGram
from jaxspec.engine.batch import power_of_two
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, weight_bytes
from jaxspec.models.layers import Backend
from jaxspec.models.paged import PagedModel
from jaxspec.models.storage import stored_for
from jaxspec.parallel.mesh import check_divides
from jaxspec.platforms import facts
from pallas_kernels.device import Device
from pallas_kernels.paged_attention import OP as PAGED_ATTENTION

Speculation = SpeculativeConfig | None


@dataclasses.dataclass(frozen=True)
class Model:
    """A configuration with its loaded parameters."""

    config: ModelConfig
    params: Params

    def stored_for(self, backend: Backend) -> Model:
        """The same, its matrices as that backend reads them best."""
        return dataclasses.replace(self, params=stored_for(backend, self.config, self.params))


def paged_models(
    models: dict[str, Model], config: EngineConfig, speculative: Speculation, mesh: Mesh, device: Device
) -> dict[str, PagedModel]:
    """The models over pages, with as many for each as memory allows. Raises UserError for what does not fit."""
    own = models["target"].config.max_model_len
    longest = config.max_model_len or own
    if longest > own:
        raise UserError(f"max_model_len={longest} exceeds the model's own {own}")
    for model in models.values():
        heads = {"num_heads": model.config.num_heads, "num_key_value_heads": model.config.num_kv_heads}
        block = model.config.merged["gate_up"]["gate"]
        check_divides(heads | {f"intermediate_size / {block}": model.config.mlp_width // block}, mesh.size)
    backend = Backend(device, mesh, config.kernels)
    layouts = page_layouts(models, config, speculative, mesh, device.platform, longest)
    return {
        name: PagedModel(model.config, layouts[name], context(name, model.config, speculative, longest), backend)
        for name, model in models.items()
    }


def context(name: str, model: ModelConfig, speculative: Speculation, longest: int) -> int:
    """Longest context of the target or the draft."""
    own = speculative.max_model_len if name == "draft" and speculative else None
    return min(longest, own or model.max_model_len, model.max_model_len)


def page_layouts(
    models: dict[str, Model],
    config: EngineConfig,
    speculative: Speculation,
    mesh: Mesh,
    platform: str,
    longest: int,
) -> dict[str, CacheLayout]:
    page_size = config.page_size or facts(platform).page_size

    def layout(model: Model, pages: int) -> CacheLayout:
        dtype = model.params["embed"].dtype
        return cache_layout(model.config, page_size=page_size, num_pages=pages, dtype=dtype, platform=platform)

    pages = config.num_pages
    if pages is None:
        page_bytes = [layout(model, 1).stored_bytes(mesh.size, platform) for model in models.values()]
        temporary = temporary_bytes(models, config, speculative)
        memory = budget.free_memory(mesh.devices.flat[0], config.memory_utilization, temporary)
        # Beyond what all rows can use, prefix reuse takes as much again.
        most = config.max_num_seqs * -(-(longest + 64) // page_size) * (2 if config.enable_prefix_caching else 1)
        pages = min(budget.num_pages(memory, *page_bytes), most)
    return {name: layout(model, pages) for name, model in models.items()}


def table_widths(device: Device, kernels: str | None, most: int, page_size: int) -> tuple[int, ...]:
    """The widths N, in pages, that block tables come in; the last has room for `most` pages. Each is another program.
    Attention in plain jnp costs what the table is wide. As a kernel it does not, but on GPU it is faster where all
    tables are short enough for keys not to be split."""
    known = facts(device.platform)
    if known.gathers or PAGED_ATTENTION.choose(kernels, device).name == "reference":
        return tuple(1 << i for i in range(power_of_two(most).bit_length()))
    few = known.short_row // page_size
    return (few, most) if 0 < few < most else (most,)


def temporary_bytes(models: dict[str, Model], config: EngineConfig, speculative: Speculation) -> int:
    """An upper estimate of what the largest programs need beside weights and pages: a few copies of a round's
    logits in float32, and the activations of a prefill chunk."""
    drafts = speculative.num_speculative_tokens if speculative else 0
    logits = 6 * config.max_num_seqs * (drafts + 1) * models["target"].config.vocab_size * 4
    widest = max(4 * m.config.mlp_width + 8 * m.config.width + 2 * m.config.qkv_width for m in models.values())
    return logits + config.max_num_seqs * config.prefill_chunk * widest * 4


def drafters(speculative: Speculation, draft: PagedModel | None) -> dict[int, Drafter | None]:
    """Drafts a round -> drafter. The compiled choices: none, half of num_speculative_tokens, all of them."""
    if speculative is None:
        return {0: None}
    if "draft_model" in str(speculative.method) and draft is None:
        raise UserError(f"method={speculative.method!r} needs the draft's parameters")
    full = speculative.num_speculative_tokens
    choices = sorted({full, full // 2} - {0})
    return {0: None} | {k: drafter(speculative, draft, k) for k in choices}


def drafter(speculative: SpeculativeConfig, draft: Any, k: int) -> Drafter:
    lookup = NGram(k, *speculative.lookup)
    if speculative.method == "ngram":
        return lookup
    model = DraftModel(k, draft)
    return Combined(lookup, model) if speculative.method == "ngram+draft_model" else model


def draft_cost(models: dict[str, Model]) -> float:
    """Of a draft step, in target passes, from above: by bytes, but a small model is slower than its bytes."""
    if "draft" not in models:
        return 0.0
    size = {name: weight_bytes(model.config, model.params) for name, model in models.items()}
    return max(0.5, size["draft"] / size["target"])
