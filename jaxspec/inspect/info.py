"""Description of a model and of the memory that it needs, from its configuration and tokenizer without its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import checkpoints
from jaxspec.bench import presets
from jaxspec.common.errors import UserError
from jaxspec.engine.assembly import catalogue
from jaxspec.engine.catalogue import ClosedCatalogue
from jaxspec.hardware.accelerators import Accelerator, accelerator
from jaxspec.hardware.chips import chips
from jaxspec.inspect import fit
from jaxspec.inspect.heads import head_text, understood
from jaxspec.inspect.pool import pool
from jaxspec.loading.drafts import check_same_tokenizer
from jaxspec.loading.quantised import bytes_per_device, forms_of_checkpoint, stored_forms
from jaxspec.loading.resolved import ResolvedModel, resolved, resolved_draft
from jaxspec.loading.weights import check_table, compute_dtype
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.paged import cache_layout
from jaxspec.options.engine import EngineConfig
from jaxspec.options.speculative import SpeculativeConfig
from pallas_kernels.device import Device, here


def describe(
    model: str, draft: str | None = None, device: str | None = None, max_num_seqs: int | None = None
) -> dict[str, Any]:
    """Return a description of a model, its draft and the default engine for them, as a dict for JSON.

    device: name of an accelerator, present or not; None for this machine's first device.
    max_num_seqs: number of rows of the engine whose programs are listed; None for the default.

    Keys of the result:
      model, draft: descriptions of the two models by `facts`; draft is None if no draft is named. draft["head"] is the
        description of a draft head by `understood`, or None for a draft model.
      draft_fits, draft_problem: whether the draft can draft for the model, and the reason if not; None without a draft.
      device: description of the device in words.
      memory_bytes: bytes that the engine may use, or None on a CPU, whose page pool has a fixed size. They include the
        weights and temporary_bytes, which programs need while they run.
      page_size, pages, tokens_that_fit: tokens per page, and the numbers of pages and tokens that fit.
      window_pages: number of pages in layers with a window; None if they have as many as all other layers.
      programs: names of the programs that an engine with warm_up=True compiles at its start.

    Raises: UserError for an unknown device.
    """
    absent = accelerator(device) if device else None
    chip = absent.device if absent else here()
    found = resolved(checkpoints.resolve(model, weights=False))
    source = found.source
    configs = {"target": found.config}
    target = facts(found, chip, source)
    document: dict[str, Any] = {"model": target, "draft": None, "draft_fits": None, "draft_problem": None}
    document["device"] = described(chip, absent)
    if draft is not None:
        draft_source = checkpoints.resolve(draft)  # includes weights: tensor names identify the type of a draft head
        try:
            drafting = resolved_draft(draft_source, found)
            reading = drafting.reading
            configs["draft"] = drafting.config
            check_same_tokenizer(source, checkpoints.load_tokenizer(source), draft_source)
            check_table(configs["target"], draft_source.name, configs["draft"])
            document["draft_fits"] = True
        except UserError as problem:
            document |= {"draft_fits": False, "draft_problem": str(problem)}
        if "draft" in configs:
            # A draft head uses its target's tokenizer and stop ids, even if the head's folder has a tokenizer.
            is_model = reading is None and checkpoints.load_fingerprint(draft_source) is None
            own_tokenizer = is_model and checkpoints.has_tokenizer(draft_source)
            document["draft"] = facts(drafting, chip, draft_source if own_tokenizer else source)
            document["draft"]["head"] = understood(reading) if reading else None
    options = EngineConfig(warm_up=True)
    if max_num_seqs is not None:
        options = dataclasses.replace(options, max_num_seqs=max_num_seqs)
    document["programs"] = programs(configs, options, chip)
    weights = sum(m["weight_bytes"] for m in (document["model"], document["draft"]) if m)
    return document | pool(configs, weights, chip, absent)


def on_chips(model: str, draft: str | None, name: str, **options: Any) -> dict[str, Any]:
    """Return the models' names, and by `fit.document` whether the models fit on the named chips.

    No device is needed. Because only shapes are used, a model may also be a preset of `jaxspec bench`.

    name: name of the chips, such as "v5e:2x4".
    options: fields of `fit.Wanted`.

    Raises: UserError for unknown names and for options that are invalid whatever the memory.
    """
    found = chips(name)

    def is_preset(name: str, table: Container[str]) -> bool:
        return name in table and not Path(name).exists()

    if is_preset(model, presets.TABLE):
        of_target = ResolvedModel(checkpoints.Source("hf", Path(model), model), presets.preset(model))
    else:
        of_target = resolved(checkpoints.resolve(model, weights=False))
    target = of_target.config
    stored = forms_of_checkpoint(of_target, options.get("quantization"))
    config = draft_stored = None
    if draft is not None and is_preset(draft, presets.TABLE | presets.HEADS):
        config = presets.preset(draft, target)
    elif draft is not None:
        # The draft is resolved with its weights, because tensor names identify the type of a draft head.
        drafting = resolved_draft(checkpoints.resolve(draft), of_target)
        config = drafting.config
        draft_stored = forms_of_checkpoint(drafting, options.get("draft_quantization"))
    if config is not None:
        check_table(target, str(draft), config)
    wanted = fit.Wanted(target, config, found, stored=stored, draft_stored=draft_stored, **options)
    return {"model": model, "draft": draft} | fit.document(wanted)


def programs(configs: dict[str, ModelConfig], options: EngineConfig, chip: Device) -> list[str]:
    """Return the names of the programs that an engine with these models and options compiles, in order of compiling."""
    drafted = configs.get("draft")
    spec = SpeculativeConfig(model="draft") if drafted else None
    longest = configs["target"].max_model_len + (spec.num_speculative_tokens if spec else 0)
    found = catalogue(options, spec, chip, longest, lags=bool(drafted and drafted.cached_layers))
    assert isinstance(found, ClosedCatalogue)
    return [*map(str, (*found.prefills, *found.launches)), *found.others]


def this_device() -> str:
    """Return a description of this machine's first device, with a hint if kernels do not run on it."""
    return described(here())


def described(chip: Device, absent: Accelerator | None = None) -> str:
    """Return a description of a device in words, with a hint if kernels do not run on it.

    absent: data sheet of an absent device, whose figures the description includes; None for a device of this machine.
    """
    dtype = compute_dtype("auto", chip).name
    name = chip.kind
    if absent:
        name = f"{name}, {absent.memory / 1e9:.0f} GB at {absent.bandwidth / 1e9:,.0f} GB/s"
    if chip.lacks_bfloat16:
        return f"{name}: plain forms in {dtype}, as {chip.no_kernels()}"
    return f"{name}: kernels in {dtype}" if absent else name


def facts(model: ResolvedModel, chip: Device, tokenizer_source: checkpoints.Source) -> dict[str, Any]:
    """Return a description of one model. Its dtype and bytes are those of the default engine on the device `chip`.

    The key "quantization" names the form of a checkpoint in 8 bits. It is None for any other checkpoint.
    """
    source, config = model.source, model.config
    tokenizer = checkpoints.load_tokenizer(tokenizer_source)
    ends = checkpoints.load_ends(tokenizer_source, tokenizer)
    dtype = compute_dtype("auto", chip)
    own = {name: p for name, p in parameters(config, dtype).items() if not p.from_target}
    form = checkpoints.stored_quantization(source)
    stored = stored_forms(model, own) if form else None
    page = cache_layout(config, page_size=1, num_pages=1, dtype=dtype, platform=chip.platform)
    return {
        "name": source.name,
        "format": source.kind,
        "architecture": config.family if type(config) is ModelConfig else draft_spec(config).method,
        "shape": shape(config),
        "parameters": sum(p.size for p in own.values()),
        "dtype": dtype.name,
        "quantization": form and form.name,
        "weight_bytes": sum(bytes_per_device(None, name, p, stored) for name, p in own.items()),
        "context_length": config.max_model_len,
        "kv_bytes_per_token": page.page_bytes,
        "vocab_size": config.vocab_size,
        "tokenizer_size": len(tokenizer),
        "stop_ids": list(ends),
        "stop_tokens": tokenizer.convert_ids_to_tokens(list(ends)),
        "stop_ids_named_by": [list(parts) for parts in ends.values()],
        "chat_template": bool(getattr(tokenizer, "chat_template", None)),
    }


def shape(c: ModelConfig) -> str:
    """Return a text with a decoder's number of layers with a KV cache, width, heads, and reduced vocabulary."""
    heads = f"{c.num_heads} query and {c.num_kv_heads} key-value heads of {c.head_dim}"
    count = len(c.cached_layers)
    layers = f"{count} layers, width {c.width}" + (f", {heads}" if count else "")
    return layers + (f", proposes {c.head_size} of {c.vocab_size} ids" if c.reduced_vocab_size else "")


def stops(model: Mapping[str, Any]) -> list[str]:
    """Return a line for each stop token of a model (described by `facts`), with the files or fields that name it."""
    named = zip(model["stop_ids"], model["stop_tokens"], model["stop_ids_named_by"], strict=True)
    return [f"{i} {token} ({', '.join(parts)})" for i, token, parts in named]


def lacking(document: dict[str, Any]) -> str:
    """Return the reasons why models do not fit on chips, and the changes that would make them fit.

    document: result of `on_chips`.
    """
    would = " or ".join(document["would_fit"]) or "no single change of dtype, context, rows or chips"
    return f"{'; '.join(document['fit']['problems'])}; {would} would"


def problem(document: dict[str, Any]) -> str | None:
    """Return the reason why models do not fit together (`describe`) or on the chips (`on_chips`), or None if they fit.

    document: result of either function.
    """
    if "fit" not in document:
        of_draft: str | None = document["draft_problem"]
        return of_draft
    names = " and ".join(filter(None, (document["model"], document["draft"])))
    return None if document["fits"] else f"{names} on {document['chips']['name']}: {lacking(document)}"


def show(document: dict[str, Any]) -> None:
    """Print the result of `describe` as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    models = [m for m in (document["model"], document["draft"]) if m]
    table = Table(show_header=len(models) > 1)
    for heading in ("", "target", "draft")[: 1 + len(models)]:
        table.add_column(heading, overflow="fold")

    def row(label: str, *cells: str) -> None:
        table.add_row(Text(label, style="bold"), *(Text(cell) for cell in cells))

    empty_draft_cell = [""] if len(models) > 1 else []
    row("device", document["device"], *empty_draft_cell)
    row("model", *(f"{m['name']} ({m['format']})" for m in models))
    row("architecture", *(f"{m['architecture']}: {m['shape']}" for m in models))
    if head := models[-1].get("head"):
        row("understood", "", head_text(head))
    row("parameters", *(f"{m['parameters'] / 1e6:,.1f} million" for m in models))
    forms = (f"{m['dtype']}{', matrices in ' * bool(m['quantization'])}{m['quantization'] or ''}" for m in models)
    row("dtype", *(f"{x}: {m['weight_bytes'] / 1e9:.2f} GB of weights" for x, m in zip(forms, models, strict=True)))
    row("context length", *(f"{m['context_length']} tokens" for m in models))
    row("KV cache", *(f"{m['kv_bytes_per_token']} bytes per token" for m in models))
    row("tokenizer", *(f"{m['tokenizer_size']} tokens, vocabulary of {m['vocab_size']}" for m in models))
    row("stop ids", *("\n".join(stops(m)) or "none" for m in models))
    row("chat template", *("yes" if m["chat_template"] else "no" for m in models))
    if document["memory_bytes"] is not None:
        weights = sum(m["weight_bytes"] for m in models) / 1e9
        parts = f"weights {weights:.2f}, temporary {document['temporary_bytes'] / 1e9:.2f}, pages the rest"
        row("memory", f"{document['memory_bytes'] / 1e9:.2f} GB: {parts}", *empty_draft_cell)
    fits = f"about {document['pages']} of {document['page_size']} tokens = {document['tokens_that_fit']} tokens"
    if document["window_pages"] is not None:
        fits += f"; {document['window_pages']} in layers with a window"
    row("pages that fit", fits, *(["the same, shared"] if len(models) > 1 else []))
    row("compiled at start", f"{len(document['programs'])} programs, of an engine that warms up")
    if document["draft_fits"] is not None:
        row("draft fits", "yes" if document["draft_fits"] else document["draft_problem"])
    Console().print(table)


def show_chips(document: dict[str, Any]) -> None:
    """Print the result of `on_chips` as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    found = document["fit"]
    of = document["chips"]
    table = Table(show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")

    def gb(size: float) -> str:
        return f"{size / 1e9:.2f} GB"

    names = [document["model"], *([document["draft"]] if document["draft"] else [])]
    degrees = [document["tensor_parallel_size"], document["draft_tensor_parallel_size"]]
    parts = zip(names, degrees, (found["target_weights"], found["draft_weights"]), strict=False)
    pages = {"target": found["target_page"], "draft": found["draft_page"], "features": found["features_page"]}
    each = f"{of['memory_bytes'] / 1e9:.0f} GB at {of['bandwidth_bytes_per_second'] / 1e9:,.0f} GB/s"
    rows = {"chips": f"{of['name']}, each {each}; hosts: {of['hosts']}"}
    rows["dtype"] = found["dtype"]
    rows["memory"] = f"{gb(found['memory'])} a device for the engine, of which"
    rows |= {f"  {name}": f"{gb(size)} of weights, sharded over {degree}" for name, degree, size in parts}
    drafts = document["num_speculative_tokens"]
    rows["  temporary"] = f"{gb(found['temporary'])}: {document['max_num_seqs']} rows, {drafts} drafts a round"
    rows["  left"] = gb(found["free"])
    page = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in pages.items() if size)
    rows["page"] = f"{found['page_size']} tokens a device: {page}"
    rows["pages that fit"] = f"{found['pages']} = {found['tokens']} tokens of context in all"
    if found["window_pages"] is not None:
        saved = (found["pages"] - found["window_pages"]) * found["window_page"]
        rows["window layers"] = f"{found['window_pages']} pages, which saves {gb(saved)} a device"
    rows["one row"] = f"at most {found['longest_context']} tokens"
    rows["rows"] = f"{found['rows']} of {document['max_model_len']} tokens at once"
    rows["fits"] = f"no: {lacking(document)}" if found["problems"] else "yes"
    for label, text in rows.items():
        table.add_row(Text(label, style="bold"), Text(text))
    Console(width=min(Console().width, 80)).print(table)
