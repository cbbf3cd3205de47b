"""What a model is and what it needs, read from its configuration and tokenizer: no weights are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import checkpoints
from jaxspec.bench import presets
from jaxspec.cache import budget
from jaxspec.cache.pages import cache_layout, features_layout
from jaxspec.common.errors import UserError
from jaxspec.engine.catalogue import Closed
from jaxspec.engine.setup import catalogue, temporary_bytes
from jaxspec.hardware.accelerators import Accelerator, accelerator
from jaxspec.hardware.chips import chips
from jaxspec.hardware.platforms import facts as platform_facts
from jaxspec.inspect import fit
from jaxspec.loading.drafts import check_same_tokenizer
from jaxspec.loading.resolved import ResolvedModel, resolved, resolved_draft
from jaxspec.loading.weights import check_table, compute_dtype
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.model import Model
from jaxspec.models.reading import Reading
from jaxspec.options.engine import EngineConfig
from jaxspec.options.speculative import SpeculativeConfig
from pallas_kernels.device import Device, here


def describe(
    model: str, draft: str | None = None, device: str | None = None, max_num_seqs: int | None = None
) -> dict[str, Any]:
    """{"model": {...}, "draft": {...} where one is named, "device", "memory_bytes", "temporary_bytes", "page_size",
    "pages", "tokens_that_fit", "draft_fits", "draft_problem", "programs"}.

    device: the name of an accelerator, which need not be here; None for this machine's first.
    memory_bytes: what the engine uses of it, None where that is not known; of it weights and, for programs,
    temporary_bytes are taken. pages: how many the default engine could hold of both models together in what remains.
    The draft's "head" is what its checkpoint was taken for (`understood`), None where it is a model of its own.
    programs: the names of those that an engine compiles which warms up; max_num_seqs: its rows, None for the default.
    draft_fits: None without a draft, else whether it can draft for the model; draft_problem says why not.

    Raises: UserError for an unknown device.
    """
    absent = accelerator(device) if device else None
    chip = absent.device if absent else here()
    found = resolved(checkpoints.resolve(model, weights=False))
    source, configs = found.source, {"target": found.config}
    target = facts(source, configs["target"], chip, source)
    document: dict[str, Any] = {"model": target, "draft": None, "draft_fits": None, "draft_problem": None}
    document["device"] = described(chip, absent)
    if draft is not None:
        draft_source = checkpoints.resolve(draft)  # of a head, the tensors' names say what it is
        try:
            drafting = resolved_draft(draft_source, found)
            configs["draft"], reading = drafting.config, drafting.reading
            check_same_tokenizer(source, checkpoints.load_tokenizer(source), draft_source)
            check_table(configs["target"], draft_source.name, configs["draft"])
            document["draft_fits"] = True
        except UserError as problem:
            document |= {"draft_fits": False, "draft_problem": str(problem)}
        if "draft" in configs:
            # A head stops where its target does, whatever it brings.
            own = reading is None and checkpoints.load_fingerprint(draft_source) is None
            own = own and checkpoints.has_tokenizer(draft_source)
            document["draft"] = facts(draft_source, configs["draft"], chip, draft_source if own else source)
            document["draft"]["head"] = understood(reading) if reading else None
    options = EngineConfig(warm_up=True)
    options = options if max_num_seqs is None else dataclasses.replace(options, max_num_seqs=max_num_seqs)
    document["programs"] = programs(configs, options, chip)
    return document | pool(configs, document, chip, absent)


def on_chips(model: str, draft: str | None, name: str, **options: Any) -> dict[str, Any]:
    """Whether both fit on the chips of that name: `fit.document`, and the models' names. No device is looked for, and
    a model may be a preset of `jaxspec bench`: only shapes are read.

    options: of `fit.Asked`. Raises: UserError for unknown names, and for what no engine can be made with.
    """
    found = chips(name)
    public = lambda name, table: name in table and not Path(name).exists()
    if public(model, presets.TABLE):
        of_target = ResolvedModel(checkpoints.Source("hf", Path(model), model), presets.preset(model))
    else:
        of_target = resolved(checkpoints.resolve(model, weights=False))
    target = of_target.config
    config = None
    if draft is not None and public(draft, presets.TABLE | presets.HEADS):
        config = presets.preset(draft, target)
    elif draft is not None:
        # Of a head, the tensors' names say what it is.
        config = resolved_draft(checkpoints.resolve(draft), of_target).config
    if config is not None:
        check_table(target, str(draft), config)
    return {"model": model, "draft": draft} | fit.document(fit.Asked(target, config, found, **options))


def programs(configs: dict[str, ModelConfig], options: EngineConfig, chip: Device) -> list[str]:
    """Those of such an engine, in the order in which they are compiled."""
    drafted = configs.get("draft")
    spec = SpeculativeConfig(model="draft") if drafted else None
    longest = configs["target"].max_model_len + (spec.num_speculative_tokens if spec else 0)
    found = catalogue(options, spec, chip, longest, lags=bool(drafted and drafted.cached_layers))
    assert isinstance(found, Closed)
    return [*map(str, (*found.prefills, *found.launches)), "copy_pages"]


def pool(
    configs: dict[str, ModelConfig], document: dict[str, Any], chip: Device, absent: Accelerator | None
) -> dict[str, Any]:
    """The memory of the default engine and how many pages it holds, as `engine.setup` divides it."""
    options, known = EngineConfig(), platform_facts(chip.platform)
    models = {name: Model(config, {}) for name, config in configs.items()}
    spec = SpeculativeConfig(model="draft") if "draft" in models else None
    temporary = temporary_bytes(models, options, spec, chip.platform)
    taken = temporary + sum(m["weight_bytes"] for m in (document["model"], document["draft"]) if m)
    if absent is not None:
        memory: int | None = int(absent.programs_memory * options.memory_utilization)
        free = int(absent.programs_memory * options.memory_utilization) - taken
    else:  # weights are not loaded; a pool of fixed size has nothing to do with them
        free = budget.free_memory(jax.devices()[0], options.memory_utilization, taken)
        memory = None if known.cache_bytes else free + taken
    layout = {"page_size": known.page_size, "num_pages": 1, "dtype": compute_dtype("auto", chip)}
    layouts: list[Any] = [cache_layout(config, **layout, platform=chip.platform) for config in configs.values()]
    width = draft_spec(configs["draft"]).features_width if "draft" in configs else 0
    layouts.append(features_layout(width, page_size=known.page_size, num_pages=1, dtype=layout["dtype"]))
    pages = max(free, 0) // sum(layout.stored_bytes(1, chip.platform) for layout in layouts)
    fits = {"page_size": known.page_size, "pages": pages, "tokens_that_fit": pages * known.page_size}
    return {"memory_bytes": memory, "temporary_bytes": temporary, **fits}


def this_device() -> str:
    """This machine's first device, and what it does without."""
    return described(here())


def described(chip: Device, absent: Accelerator | None = None) -> str:
    """What it is, of one that is not here by its data sheet, and whether kernels run there."""
    dtype = compute_dtype("auto", chip).name
    name = chip.kind
    if absent:
        name = f"{name}, {absent.memory / 1e9:.0f} GB at {absent.bandwidth / 1e9:,.0f} GB/s"
    if chip.lacks_bfloat16:
        return f"{name}: plain forms in {dtype}, as {chip.no_kernels()}"
    return f"{name}: kernels in {dtype}" if absent else name


def facts(
    source: checkpoints.Source, config: ModelConfig, chip: Device, tokenizer_source: checkpoints.Source
) -> dict[str, Any]:
    """One model by itself. dtype and bytes are those of the default engine on this platform."""
    tokenizer = checkpoints.load_tokenizer(tokenizer_source)
    ends = checkpoints.load_ends(tokenizer_source, tokenizer)
    dtype = compute_dtype("auto", chip)
    own = [p for p in parameters(config, dtype).values() if not p.borrowed]
    page = cache_layout(config, page_size=1, num_pages=1, dtype=dtype, platform=chip.platform)
    return {
        "name": source.name,
        "format": source.kind,
        "architecture": config.family if type(config) is ModelConfig else draft_spec(config).method,
        "shape": shape(config),
        "parameters": sum(p.size for p in own),
        "dtype": dtype.name,
        "weight_bytes": sum(p.nbytes for p in own),
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
    heads = f"{c.num_heads} query and {c.num_kv_heads} key-value heads of {c.head_dim}"
    count = len(c.cached_layers)
    layers = f"{count} layers, width {c.width}" + (f", {heads}" if count else "")
    return layers + (f", proposes {c.head_size} of {c.vocab_size} ids" if c.reduced_vocab_size else "")


def understood(reading: Reading) -> dict[str, Any]:
    """What a head's checkpoint was taken for. layers_read: by what goes into them, L the last norm; [] is what leaves
    that. max_drafts: a round, None where nothing limits them. Then what its own method knows of it."""
    c, spec = reading.config, draft_spec(reading.config)
    declared = {name.rpartition(".")[2] for name in parameters(c, "float32")}
    known = {field.name for field in dataclasses.fields(ModelConfig)} | {"taps", "has_table", "has_head"}
    own = {field.name: getattr(c, field.name) for field in dataclasses.fields(c) if field.name not in known}
    facts = {
        "layers_read": list(spec.taps),
        "proposes": c.head_size,
        "max_drafts": spec.max_drafts,
        "mask_id": c.mask_id,
    }
    facts |= {"own_table": "embed" in declared, "own_head": "head" in declared}
    return {"method": spec.method, **facts, **own, "remark": reading.remark or None}


def said(head: Mapping[str, Any]) -> str:
    """The same as text."""

    def word(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "none" if value is None else str(value)

    return ", ".join(f"{name.replace('_', ' ')}: {word(value)}" for name, value in head.items())


def stops(model: Mapping[str, Any]) -> list[str]:
    """Each token that ends a text, with the parts of the checkpoint that name it."""
    named = zip(model["stop_ids"], model["stop_tokens"], model["stop_ids_named_by"], strict=True)
    return [f"{i} {token} ({', '.join(parts)})" for i, token, parts in named]


def lacking(document: dict[str, Any]) -> str:
    """Return why a model does not fit on chips, and what would."""
    would = " or ".join(document["would_fit"]) or "no single change of dtype, context, rows or chips"
    return f"{'; '.join(document['fit']['problems'])}; {would} would"


def problem(document: dict[str, Any]) -> str | None:
    """Return why a document of `describe` or `on_chips` answers no, None where it answers yes."""
    if "fit" not in document:
        return document["draft_problem"]
    names = " and ".join(filter(None, (document["model"], document["draft"])))
    return None if document["fits"] else f"{names} on {document['chips']['name']}: {lacking(document)}"


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
    if head := models[-1].get("head"):
        row("understood", "", said(head))
    row("parameters", *(f"{m['parameters'] / 1e6:,.1f} million" for m in models))
    row("dtype", *(f"{m['dtype']}, {m['weight_bytes'] / 1e9:.2f} GB of weights" for m in models))
    row("context length", *(f"{m['context_length']} tokens" for m in models))
    row("KV cache", *(f"{m['kv_bytes_per_token']} bytes per token" for m in models))
    row("tokenizer", *(f"{m['tokenizer_size']} tokens, vocabulary of {m['vocab_size']}" for m in models))
    row("stop ids", *("\n".join(stops(m)) or "none" for m in models))
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
    row("compiled at start", f"{len(document['programs'])} programs, of an engine that warms up")
    if document["draft_fits"] is not None:
        row("draft fits", "yes" if document["draft_fits"] else document["draft_problem"])
    Console().print(table)


def show_chips(document: dict[str, Any]) -> None:
    """What `on_chips` says, as a table on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    found, of, k = document["fit"], document["chips"], document["num_speculative_tokens"]
    table = Table(show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    gb = lambda size: f"{size / 1e9:.2f} GB"
    names = [document["model"], *([document["draft"]] if document["draft"] else [])]
    cuts = [document["tensor_parallel_size"], document["draft_tensor_parallel_size"]]
    parts = zip(names, cuts, (found["target_weights"], found["draft_weights"]), strict=False)
    pages = {"target": found["target_page"], "draft": found["draft_page"], "features": found["features_page"]}
    each = f"{of['memory_bytes'] / 1e9:.0f} GB at {of['bandwidth_bytes_per_second'] / 1e9:,.0f} GB/s"
    rows = {"chips": f"{of['name']}, each {each}; hosts: {of['hosts']}"}
    rows["dtype"] = found["dtype"]
    rows["memory"] = f"{gb(found['memory'])} a device for the engine, of which"
    rows |= {f"  {name}": f"{gb(size)} of weights, cut over {degree}" for name, degree, size in parts}
    rows["  temporary"] = f"{gb(found['temporary'])}: {document['max_num_seqs']} rows, {k} drafts a round"
    rows["  left"] = gb(found["free"])
    page = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in pages.items() if size)
    rows["page"] = f"{found['page_size']} tokens a device: {page}"
    rows["pages that fit"] = f"{found['pages']} = {found['tokens']} tokens of context in all"
    rows["one row"] = f"at most {found['longest_context']} tokens"
    rows["rows"] = f"{found['rows']} of {document['max_model_len']} tokens at once"
    rows["fits"] = f"no: {lacking(document)}" if found["problems"] else "yes"
    for label, said in rows.items():
        table.add_row(Text(label, style="bold"), Text(said))
    console = Console()
    Console(width=min(console.width, 80)).print(table)
