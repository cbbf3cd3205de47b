"""Measuring how many draft tokens a target accepts: by category of prompts, by position, greedy and sampled."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from jaxspec.api.llm import LLM
from jaxspec.api.outputs import whole
from jaxspec.common.errors import UserError
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.hardware.platforms import facts
from jaxspec.options.keywords import EngineOptions
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.placement import device_name
from jaxspec.verify.rules import SEEDED, UNSEEDED

TEMPERATURES = (0.0, 0.7)
HELDOUT = Path(__file__).with_name("heldout.json")  # 64 user messages that the grammar of the training data cannot make
ALL = "all"
Prompts = Mapping[str, Sequence[str]]  # user messages by category


def read_prompts(path: Path) -> Prompts:
    """Read user messages from a JSON file {category: [text, ...]}.

    Raises: FileNotFoundError or UserError that names the file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give --prompts FILE.json with {{category: [text, ...]}}")
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not a JSON file: {error}") from None
    if not isinstance(prompts, dict) or not prompts or not all(map(are_texts, prompts.values())):
        raise UserError(f"{path} must hold {{category: [text, ...]}}, with at least one text in each")
    return prompts


def are_texts(value: Any) -> bool:
    """Return whether a value of a JSON file is a list of one or more texts, none of them empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value)


def evaluate(
    target: str,
    draft: str,
    prompts: Prompts,
    *,
    max_tokens: int,
    num_speculative_tokens: int = SpeculativeConfig.num_speculative_tokens,
    tree: Sequence[int] = (),
    temperatures: Sequence[float] = TEMPERATURES,
    rule: str | None = None,
    samples: int = 1,
    draft_quantization: str | None = None,
    progress: bool = True,
    **options: Unpack[EngineOptions],
) -> dict[str, Any]:
    """Answer all prompts, and return a JSON document that counts the draft tokens that the target accepted.

    For each temperature, the document has a row for each category and one for all categories together.

    Args:
      target: name of the target model, as in LLM.
      draft: name of the draft, as in SpeculativeConfig.
      prompts: user messages by category.
      max_tokens: maximum number of tokens of an answer.
      num_speculative_tokens: K, the number of draft tokens per round.
      tree: width, depth and nodes of a tree of draft tokens, in place of num_speculative_tokens; empty for no tree.
      temperatures: temperatures to measure at; 0 is greedy.
      rule: acceptance rule for temperatures above 0; by default "block", or "coupled" with a tree.
      samples: number of answers to each prompt, with seeds 0, 1, ...
      draft_quantization: form of the draft's weights; `quantization` among the options is that of the target's.
      progress: whether to show a progress bar.
      options: fields of EngineConfig.
    """
    params = [
        [SamplingParams(temperature=t, max_tokens=max_tokens, seed=i) for i in range(samples)] for t in temperatures
    ]
    count = sum(map(len, prompts.values()))
    drafts: dict[str, Any] = {"num_speculative_tokens": num_speculative_tokens}
    if tree:
        drafts = dict(zip(("tree_width", "tree_depth", "tree_nodes"), tree, strict=True))
    rule = rule or (SEEDED if tree else UNSEEDED)
    speculation = {"model": draft, "adaptive": False, "rejection_sample_method": rule} | drafts
    speculation["quantization"] = draft_quantization
    rows = facts(jax.default_backend()).evaluated_rows or count
    options.setdefault("max_num_seqs", min(rows, count * samples))
    llm = LLM(target, speculative_config=speculation, **options)
    asked = [llm.render_chat([{"role": "user", "content": text}]) for texts in prompts.values() for text in texts]
    measured = []
    for p in params:
        outputs = whole(llm.generate([text for text in asked for _ in p], p * count, progress=progress))
        metrics = iter(output.metrics for output in outputs)
        answers = [list(itertools.islice(metrics, samples)) for _ in asked]
        remaining = iter(answers)
        parts = {category: list(itertools.islice(remaining, len(texts))) for category, texts in prompts.items()}
        measured += [row(p[0].temperature, *part) for part in (parts | {ALL: answers}).items()]
    deepest = tree[1] if tree else num_speculative_tokens
    for line in measured:
        line["accepted_at"] = line["accepted_at"][:deepest]  # positions beyond a tree's depth never hold a draft
    return {
        "target": target,
        "draft": draft,
        "device": device_name(),
        "dtype": str(llm.target.dtype),
        "quantization": options.get("quantization"),
        "draft_quantization": draft_quantization,
        "num_speculative_tokens": deepest,
        "tree": list(tree),
        "rule": rule,
        "samples": samples,
        "max_tokens": max_tokens,
        "rows": measured,
    }


def row(temperature: float, category: str, answers: Sequence[Sequence[SpecDecodeMetrics]]) -> dict[str, Any]:
    """Return one row of the document of `evaluate`.

    answers: for each prompt, the metrics of its samples.

    The row's accepted_at holds the shares of all rounds that accepted the 1st, 2nd, ... draft token. Its standard_error
    is that of the mean acceptance length, over repeated sampling of the same prompts.
    """
    metrics = SpecDecodeMetrics()
    for answer in itertools.chain.from_iterable(answers):
        metrics += answer
    return {
        "temperature": temperature,
        "category": category,
        "prompts": len(answers),
        "tokens": metrics.num_emitted_tokens,
        "num_drafts": metrics.num_drafts,
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "standard_error": standard_error(answers, metrics),
        "accepted_at": [n / max(metrics.num_drafts, 1) for n in metrics.num_accepted_tokens_per_pos],
    }


def standard_error(answers: Sequence[Sequence[SpecDecodeMetrics]], total: SpecDecodeMetrics) -> float | None:
    """Return the standard error of the mean acceptance length, a ratio of sums.

    answers: for each prompt, the metrics of its samples. total: the sum of all these metrics.

    Returns: None with one sample per prompt, or without any round of drafts.
    """
    if len(answers[0]) < 2 or not total.num_drafts:
        return None
    mean = total.num_accepted_tokens / total.num_drafts
    off = np.array([[m.num_accepted_tokens - mean * m.num_drafts for m in samples] for samples in answers])
    return float(np.sqrt((off.var(axis=1, ddof=1) * off.shape[1]).sum()) / total.num_drafts)


def show(document: dict[str, Any]) -> None:
    """Print the document of `evaluate` as a table on standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    k = document["num_speculative_tokens"]
    draft, target = (
        f"{document[name]} in {form}" if (form := document[option]) else document[name]
        for name, option in (("draft", "draft_quantization"), ("target", "quantization"))
    )
    head = f"{draft} for {target} ({document['dtype']}) on {document['device']}, K = {k}"
    if tree := document["tree"]:
        head += f" levels of {tree[0]}, a tree of {tree[2]} nodes"
    head += f", {document['rule']} rule, {document['samples']} sample(s) of each prompt"
    console.print(head, highlight=False, soft_wrap=True)
    table = Table()
    for column in ("temperature", "prompts", "tokens", "accept. length"):
        table.add_column(column, justify="left" if column == "prompts" else "right")
    table.add_column("accepted at " + " ".join(str(i + 1) for i in range(k)), justify="right")
    for r in document["rows"]:
        rates = " ".join(f"{rate:4.0%}" for rate in r["accepted_at"])
        length = f"{r['mean_acceptance_length']:.2f}"
        if r["standard_error"] is not None:
            length += f" ± {r['standard_error']:.3f}"
        last = r["category"] == ALL
        table.add_row(f"{r['temperature']:g}", r["category"], str(r["tokens"]), length, rates, end_section=last)
    console.print(table)
