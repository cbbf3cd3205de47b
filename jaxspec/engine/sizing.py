"""Functions that compute the memory that an engine needs for pages and programs, from options and layouts alone."""

from __future__ import annotations

from collections.abc import Mapping

from jaxspec.cache import budget, windows
from jaxspec.cache.pages import CacheLayout
from jaxspec.engine.batch import ChunkShape
from jaxspec.engine.catalogue import most_running
from jaxspec.hardware.platforms import facts
from jaxspec.models.model import Model
from jaxspec.options.engine import EngineConfig
from jaxspec.options.speculative import SpeculativeConfig

Speculation = SpeculativeConfig | None


def demand(
    layouts: Mapping[str, CacheLayout],
    config: EngineConfig,
    speculative: Speculation,
    longest: int,
    degrees: Mapping[str, int],
    platform: str,
) -> budget.Demand:
    """Return the sizes that determine the number of pages.

    layouts: layout of each part of the cache: "target", "draft", "features".
    longest: maximum number of tokens of a row.
    degrees: number of devices over which each part is sharded.
    """
    target = layouts["target"]
    in_windows = windows_of(target, config, speculative, longest, degrees["target"], platform)
    page_bytes = [layout.stored_bytes(degrees[name], platform) for name, layout in layouts.items()]
    regarded = {"target": False} if in_windows else {}
    indexed = (x.most_pages(degrees[name], platform, in_window=regarded.get(name)) for name, x in layouts.items())
    return budget.Demand(page_bytes, most_pages(config, longest, target.page_size), in_windows, min(indexed))


def most_pages(config: EngineConfig, longest: int, page_size: int) -> int:
    """Return the largest number of pages that rows of up to `longest` tokens can use."""
    most = config.max_num_seqs * -(-(longest + 64) // page_size)
    # With prefix caching there is room for the pages of all rows, and for as many reusable pages of finished requests.
    return 2 * most if config.enable_prefix_caching else most


def windows_of(
    layout: CacheLayout, config: EngineConfig, speculative: Speculation, longest: int, degree: int, platform: str
) -> budget.Windows | None:
    """Return the pages of the target's layers with a window, for a pool of their own.

    Return None if it has no such layers, or if a window holds a whole row.

    layout: layout of the target's cache. longest: as in `demand`. degree: the target's tensor parallelism.
    """
    if layout.window is None or layout.window >= longest:
        return None
    ahead = config.most_rounds * ((speculative.num_speculative_tokens if speculative else 0) + 1)
    chunk = chunk_shape(config, platform)
    rows = most_running(config.max_num_seqs)
    needed = windows.needed(layout.window, rows, ahead, chunk.rows * chunk.width, layout.page_size)
    most = layout.most_pages(degree, platform, in_window=True)
    return budget.Windows(layout.window_bytes(degree, platform), needed, most)


def chunk_shape(config: EngineConfig, platform: str, *, several: bool = True) -> ChunkShape:
    """Return the shape of the token array of a prefill pass. several: as in `ChunkShape`."""
    known = facts(platform)
    tokens = config.prefill_chunk or known.prefill_tokens
    width = min(known.piece, tokens)
    return ChunkShape(tokens // width, width, min(known.least_pieces, tokens // width), known.finer, several)


def temporary_bytes(models: dict[str, Model], config: EngineConfig, speculative: Speculation, platform: str) -> int:
    """Return an upper estimate of the bytes that the largest programs need beside weights and pages.

    The programs hold a few copies of a round's logits in float32, the activations of a prefill chunk, and the tables of
    grammars.
    """
    drafts = speculative.num_speculative_tokens if speculative else 0
    logits = 6 * config.max_num_seqs * (drafts + 1) * models["target"].config.vocab_size * 4
    sizes = [(m.config.width, layer) for m in models.values() for layer in m.config.layers]
    widest = max(4 * layer.mlp_width + 8 * width + 2 * layer.qkv_width for width, layer in sizes)
    chunk = chunk_shape(config, platform)
    return logits + chunk.rows * chunk.width * widest * 4 + (config.grammar_pool_mib << 20)
