"""What a model is and what it needs, read from its configuration and tokenizer: no weights are loaded."""

from __future__ import annotations

from typing import Any

import jax

import checkpoints
from jaxspec.cache import budget
from jaxspec.cache.pages import cache_layout
from jaxspec.config import EngineConfig
from jaxspec.errors import UserError
from jaxspec.loading import check_same_tokenizer, check_table, compute_dtype
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters
from jaxspec.platforms import facts as platform_facts
from pallas_kernels.device import Device, here


def describe(model: str, draft: str | None = None) -> dict[str, Any]:
    """{"model": {...}, "draft": {...} where one is named, "page_size", "pages", "tokens_that_fit", "draft_fits",
    "device"}.

    pages: how many the default engine could hold of both models together, on this machine's first device.
    draft_fits: None without a draft, else whether it can draft for the model; draft_problem says why not.
    """
    device = here()
    source = checkpoints.resolve(model, weights=False)
    target = facts(source, device, source)
    document: dict[str, Any] = {"model": target, "draft": None, "draft_fits": None, "draft_problem": None}
    document["device"] = described(device)
    if draft is not None:
        draft_source = checkpoints.resolve(draft, weights=False)
        shares = checkpoints.load_fingerprint(draft_source) is not None
        document["draft"] = facts(draft_source, device, source if shares else draft_source)
        try:
            check_same_tokenizer(source, checkpoints.load_tokenizer(source), draft_source)
            check_table(checkpoints.load_config(source), draft_source.name, checkpoints.load_config(draft_source))
            document["draft_fits"] = True
        except UserError as problem:
            document |= {"draft_fits": False, "draft_problem": str(problem)}
    page_size = platform_facts(device.platform).page_size
    models = [m for m in (target, document["draft"]) if m]
    weights = sum(m["weight_bytes"] for m in models) if device.platform != "cpu" else 0  # CPU's pool has a fixed size
    free = budget.free_memory(jax.devices()[0], EngineConfig().memory_utilization, weights)
    pages = max(free, 0) // sum(m["kv_bytes_per_token"] * page_size for m in models)
    return document | {"page_size": page_size, "pages": pages, "tokens_that_fit": pages * page_size}


def described(device: Device) -> str:
    """What it is, and what it does without."""
    if not device.lacks_bfloat16:
        return device.kind
    return f"{device.kind}: plain forms in {compute_dtype('auto', device).name}, as {device.no_kernels()}"


def facts(source: checkpoints.Source, device: Device, tokenizer_source: checkpoints.Source) -> dict[str, Any]:
    """One model by itself. dtype and bytes are those of the default engine on this platform."""
    config, tokenizer = checkpoints.load_config(source), checkpoints.load_tokenizer(tokenizer_source)
    dtype = compute_dtype("auto", device)
    own = [p for p in parameters(config, dtype).values() if not p.borrowed]
    page = cache_layout(config, page_size=1, num_pages=1, dtype=dtype, platform=device.platform)
    return {
        "name": source.name,
        "format": source.kind,
        "architecture": config.family,
        "shape": shape(config),
        "parameters": sum(p.size for p in own),
        "dtype": dtype.name,
        "weight_bytes": sum(p.nbytes for p in own),
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
    fits = f"about {document['pages']} of {document['page_size']} tokens = {document['tokens_that_fit']} tokens"
    row("pages that fit", fits, *(["the same, shared"] if len(models) > 1 else []))
    if document["draft_fits"] is not None:
        row("draft fits", "yes" if document["draft_fits"] else document["draft_problem"])
    Console().print(table)
