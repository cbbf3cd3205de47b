"""What a model is and what it needs, read from its configuration and tokenizer: no weights are loaded."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

import checkpoints
from jaxspec.accelerators import Accelerator, accelerator
from jaxspec.cache import budget
from jaxspec.cache.pages import cache_layout, default_page_size
from jaxspec.config import EngineConfig, SpeculativeConfig
from jaxspec.engine.setup import Model, temporary_bytes
from jaxspec.loading import check_same_tokenizer, check_table, compute_dtype, this_platform
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import abstract_params
from jaxspec.parallel.mesh import make_mesh
from pallas_kernels import _device
from pallas_kernels._device import AMPERE


def describe(model: str, draft: str | None = None, device: str | None = None) -> dict[str, Any]:
    """{"model": {...}, "draft": {...} where one is named, "device", "memory_bytes", "temporary_bytes", "page_size",
    "pages", "tokens_that_fit", "draft_fits", "draft_problem"}.

    device: the name of an accelerator, which need not be here; None for this machine's first.
    memory_bytes: what the engine uses of it, None where that is not known; of it weights and, for programs,
    temporary_bytes are taken. pages: how many the default engine could hold of both models together in what remains.
    draft_fits: None without a draft, else whether it can draft for the model; draft_problem says why not.

    Raises: ValueError for an unknown device.
    """
    name, absent = accelerator(device) if device else ("", None)
    platform = absent.platform if absent else this_platform()
    plain = absent is not None and (absent.capability or AMPERE) < AMPERE
    dtype = jnp.dtype("float32" if plain else "bfloat16") if absent else compute_dtype("auto", platform)
    source = checkpoints.resolve(model, weights=False)
    configs = {"target": checkpoints.load_config(source)}
    target = facts(source, platform, dtype, source)
    document: dict[str, Any] = {"model": target, "draft": None, "draft_fits": None, "draft_problem": None}
    document["device"] = there(name, absent, dtype.name) if absent else here(platform)
    if draft is not None:
        draft_source = checkpoints.resolve(draft, weights=False)
        configs["draft"] = checkpoints.load_config(draft_source)
        shares = checkpoints.load_fingerprint(draft_source) is not None
        document["draft"] = facts(draft_source, platform, dtype, source if shares else draft_source)
        try:
            check_same_tokenizer(source, checkpoints.load_tokenizer(source), draft_source)
            check_table(configs["target"], draft_source.name, configs["draft"])
            document["draft_fits"] = True
        except ValueError as problem:
            document |= {"draft_fits": False, "draft_problem": str(problem)}
    return document | pool(configs, document, platform, dtype, absent)


def pool(
    configs: dict[str, ModelConfig], document: dict[str, Any], platform: str, dtype: Any, absent: Accelerator | None
) -> dict[str, Any]:
    """The memory of the default engine and how many pages it holds, as `engine.setup` divides it."""
    options, page_size = EngineConfig(), default_page_size(platform)
    models = {name: Model(config, {}) for name, config in configs.items()}
    temporary = temporary_bytes(models, options, SpeculativeConfig(model="draft") if "draft" in models else None)
    taken = temporary + sum(m["weight_bytes"] for m in (document["model"], document["draft"]) if m)
    if absent is not None:
        memory: int | None = int(absent.programs_memory * options.memory_utilization)
        free = memory - taken
    else:  # weights are not loaded; CPU's pool has a fixed size
        free = budget.free_memory(jax.devices()[0], options.memory_utilization, taken)
        memory = free + taken if platform != "cpu" else None
    layout = {"page_size": page_size, "num_pages": 1, "dtype": dtype, "platform": platform}
    pages = max(free, 0) // sum(cache_layout(c, **layout).stored_bytes(1, platform) for c in configs.values())
    fits = {"page_size": page_size, "pages": pages, "tokens_that_fit": pages * page_size}
    return {"memory_bytes": memory, "temporary_bytes": temporary, **fits}


def here(platform: str) -> str:
    """This machine's first device, and what it does without."""
    kind = _device.first().device_kind
    if platform != "gpu" or not _device.before_ampere():
        return kind
    return f"{kind}: plain forms in {compute_dtype('auto', platform).name}, as {_device.no_triton()}"


def there(name: str, absent: Accelerator, dtype: str) -> str:
    """An accelerator by its data sheet, and whether kernels run there."""
    known = f"{name}, {absent.memory / 1e9:.0f} GB at {absent.bandwidth / 1e9:,.0f} GB/s"
    if (absent.capability or AMPERE) >= AMPERE:
        return f"{known}: kernels in {dtype}"
    needed, found = (".".join(map(str, version)) for version in (AMPERE, absent.capability or AMPERE))
    return f"{known}: plain forms in {dtype}, as kernels need compute capability {needed}, and it has {found}"


def facts(
    source: checkpoints.Source, platform: str, dtype: Any, tokenizer_source: checkpoints.Source
) -> dict[str, Any]:
    """One model by itself. dtype and bytes are those of the default engine on this platform."""
    config, tokenizer = checkpoints.load_config(source), checkpoints.load_tokenizer(tokenizer_source)
    arrays = [
        array
        for name, array in abstract_params(config, dtype, make_mesh()).items()
        if name != "embed" or not config.embed_width  # that is the target's
    ]
    page = cache_layout(config, page_size=1, num_pages=1, dtype=dtype, platform=platform)
    return {
        "name": source.name,
        "format": source.kind,
        "architecture": config.family,
        "shape": shape(config),
        "parameters": sum(math.prod(a.shape) for a in arrays),
        "dtype": dtype.name,
        "weight_bytes": sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays),
        "context_length": config.max_model_len,
        "kv_bytes_per_token": page.page_bytes,
        "vocab_size": config.vocab_size,
        "tokenizer_size": len(tokenizer),
        "stop_ids": list(checkpoints.load_stop_ids(source, tokenizer)),
        "stop_tokens": tokenizer.convert_ids_to_tokens(list(checkpoints.load_stop_ids(source, tokenizer))),
        "chat_template": bool(getattr(tokenizer, "chat_template", None)),
    }


def shape(c: ModelConfig) -> str:
    heads = f"{c.num_heads} query and {c.num_kv_heads} key-value heads of {c.head_dim}"
    return f"{c.num_layers} layers, width {c.width}, {heads}"


def show(document: dict[str, Any]) -> None:
    """The document as a table on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    models = [m for m in (document["model"], document["draft"]) if m]
    table = Table(show_header=len(models) > 1)
    for heading in ("", "target", "draft")[: 1 + len(models)]:
        table.add_column(heading, overflow="fold")

    def row(label: str, *cells: str) -> None:
        table.add_row(Text(label, style="bold"), *(Text(cell) for cell in cells))

    row("device", document["device"], *([""] if len(models) > 1 else []))
    row("model", *(f"{m['name']} ({m['format']})" for m in models))
    row("architecture", *(f"{m['architecture']}: {m['shape']}" for m in models))
    row("parameters", *(f"{m['parameters'] / 1e6:,.1f} million" for m in models))
    row("dtype", *(f"{m['dtype']}, {m['weight_bytes'] / 1e9:.2f} GB of weights" for m in models))
    row("context length", *(f"{m['context_length']} tokens" for m in models))
    row("KV cache", *(f"{m['kv_bytes_per_token']} bytes per token" for m in models))
    row("tokenizer", *(f"{m['tokenizer_size']} tokens, vocabulary of {m['vocab_size']}" for m in models))
    named = lambda m: (f"{i} {token}" for i, token in zip(m["stop_ids"], m["stop_tokens"], strict=True))
    row("stop ids", *(", ".join(named(m)) or "none" for m in models))
    row("chat template", *("yes" if m["chat_template"] else "no" for m in models))
    taken = sum(m["weight_bytes"] for m in models), document["temporary_bytes"]
    if document["memory_bytes"] is not None:
        parts = "weights {:.2f}, temporary {:.2f}".format(*(size / 1e9 for size in taken))
        row(
            "memory",
            f"{document['memory_bytes'] / 1e9:.2f} GB: {parts}, pages the rest",
            *([""] if len(models) > 1 else []),
        )
    fits = f"about {document['pages']} of {document['page_size']} tokens = {document['tokens_that_fit']} tokens"
    row("pages that fit", fits, *(["the same, shared"] if len(models) > 1 else []))
    if document["draft_fits"] is not None:
        row("draft fits", "yes" if document["draft_fits"] else document["draft_problem"])
    Console().print(table)
