"""How many of a draft's tokens a target accepts: by category of prompts, by position, greedy and sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec.config import EngineConfig
from jaxspec.errors import UserError
from jaxspec.llm import LLM
from jaxspec.outputs import SpecDecodeMetrics
from jaxspec.parallel.mesh import device_name
from jaxspec.platforms import facts
from jaxspec.sampling_params import SamplingParams

TEMPERATURES = (0.0, 0.7)
HELDOUT = Path(__file__).with_name("heldout.json")  # 64 texts that the grammar of the training data cannot make
ALL = "all"
Prompts = Mapping[str, Sequence[str]]  # category -> what users say


def read_prompts(path: Path) -> Prompts:
    """A JSON file {category: [text, ...]}. Raises FileNotFoundError or UserError that names the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give --prompts FILE.json with {{category: [text, ...]}}")
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no JSON file: {error}") from None
    listed = prompts.values() if isinstance(prompts, dict) else [()]
    if not listed or not all(isinstance(v, list) and v and all(isinstance(t, str) and t for t in v) for v in listed):
        raise UserError(f"{path} must hold {{category: [text, ...]}}, with one text at least in each")
    return prompts


def evaluate(
    target: str,
    draft: str,
    prompts: Prompts,
    *,
    num_speculative_tokens: int,
    max_tokens: int,
    dtype: str = EngineConfig.dtype,
    temperatures: Sequence[float] = TEMPERATURES,
    progress: bool = True,
) -> dict[str, Any]:
    """The counters of the answers to all prompts, as a document: a row for each temperature and category, and one for
    all categories together. Sampling is seeded and accepts by the standard rejection rule."""
    params = [SamplingParams(temperature=t, max_tokens=max_tokens, seed=0) for t in temperatures]
    count = sum(map(len, prompts.values()))
    speculation = {
        "model": draft,
        "num_speculative_tokens": num_speculative_tokens,
        "adaptive": False,
        "rejection_sample_method": "standard",
    }
    rows = facts(jax.default_backend()).evaluated_rows or count
    llm = LLM(target, speculative_config=speculation, dtype=dtype, max_num_seqs=min(rows, count))
    asked = [llm.render_chat([{"role": "user", "content": text}]) for texts in prompts.values() for text in texts]
    measured = []
    for p in params:
        outputs = iter(llm.generate(asked, p, progress=progress))
        total = llm.engine.no_counts()
        for category, texts in prompts.items():
            part = llm.engine.no_counts()
            for _ in texts:
                part += next(outputs).metrics
            measured.append(row(p.temperature, category, len(texts), part))
            total += part
        measured.append(row(p.temperature, ALL, count, total))
    return {
        "target": target,
        "draft": draft,
        "device": device_name(),
        "dtype": str(llm.engine.runner.params["target"]["embed"].dtype),
        "num_speculative_tokens": num_speculative_tokens,
        "max_tokens": max_tokens,
        "rows": measured,
    }


def row(temperature: float, category: str, count: int, metrics: SpecDecodeMetrics) -> dict[str, Any]:
    """accepted_at: of all rounds, the share that accepted the 1st, 2nd, ... draft."""
    return {
        "temperature": temperature,
        "category": category,
        "prompts": count,
        "tokens": metrics.num_emitted_tokens,
        "num_drafts": metrics.num_drafts,
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "accepted_at": [n / max(metrics.num_drafts, 1) for n in metrics.num_accepted_tokens_per_pos],
    }


def show(document: dict[str, Any]) -> None:
    """The table on standard output."""
    from rich.console import Console
    from rich.table import Table

    console, k = Console(), document["num_speculative_tokens"]
    head = f"{document['draft']} for {document['target']} ({document['dtype']}) on {document['device']}, K = {k}"
    console.print(head, highlight=False, soft_wrap=True)
    table = Table()
    for column in ("temperature", "prompts", "tokens", "accept. length"):
        table.add_column(column, justify="left" if column == "prompts" else "right")
    table.add_column("accepted at " + " ".join(str(i + 1) for i in range(k)), justify="right")
    for r in document["rows"]:
        rates = " ".join(f"{rate:4.0%}" for rate in r["accepted_at"])
        length = f"{r['mean_acceptance_length']:.2f}"
        last = r["category"] == ALL
        table.add_row(f"{r['temperature']:g}", r["category"], str(r["tokens"]), length, rates, end_section=last)
    console.print(table)
