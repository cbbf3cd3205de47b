"""What a drafter proposed in every round, for tests that compare it with a reference: verification hides a wrong
drafter, only lower acceptance would show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.decode import round as round_module
from jaxspec.engine.engine import Engine
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.model import Model
from jaxspec.options.speculative import SpeculativeConfig
from tests.drafters.references import common
from tests.drafters.references.common import Features
from tests.support.loaded import load, load_draft
from tests.support.tiny_models import engine


@dataclasses.dataclass
class Round:
    """A row's: its committed tokens, of which the last is pending, and the drafts that followed."""

    tokens: list[int]
    drafts: list[int]


def recording(monkeypatch) -> list[Round]:
    """All that engines propose from now on which have compiled nothing yet; rows that propose nothing are left out."""
    rounds: list[Round] = []

    def keep(tokens, num_tokens, drafts, num_proposed):
        for row in np.flatnonzero(num_proposed):
            known = tokens[row, : num_tokens[row]].tolist()
            rounds.append(Round(known, drafts[row, : num_proposed[row]].tolist()))

    propose = round_module.propose

    def recorded(context, cache, history, adjust=None):
        proposal, cache = propose(context, cache, history, adjust)
        jax.debug.callback(keep, history.tokens, history.num_tokens, proposal.tokens, proposal.num_proposed)
        return proposal, cache

    monkeypatch.setattr(round_module, "propose", recorded)
    return rounds


@dataclasses.dataclass
class Pair:
    """A target and a head, read from their folders."""

    target: Model
    head: Model

    @classmethod
    def read(cls, target_folder: Any, head_folder: Any, method: str | None = None) -> Pair:
        target = load(target_folder)
        return cls(target, load_draft(head_folder, target_folder, method, model=target))

    def engine(self, k: int, **options: Any) -> Engine:
        chosen = {"method": draft_spec(self.head.config).method, "num_speculative_tokens": k, "adaptive": False}
        if draft_spec(self.head.config).method != "mtp":
            chosen["model"] = "head"
        spec = SpeculativeConfig(**chosen | options.pop("spec", {}))
        return engine(self.target, spec, self.head, **options)


def check(target: Path, rounds: Sequence[Round], reference: Callable[..., Any], *, tolerance: float = 1e-3) -> int:
    """Every draft is the reference's, or there are two as likely within `tolerance` of the logits -> drafts compared.

    target: its folder. reference(states, tokens, k) -> (ids [k], logits [k, _], over whichever ids), greedily.
    """
    longest: list[tuple[list[int], Features]] = []
    for one in sorted(rounds, key=lambda r: -len(r.tokens)):
        if not any(known[: len(one.tokens)] == one.tokens for known, _ in longest):
            longest.append((one.tokens, states(target, one.tokens)))
    compared = 0
    for one in rounds:
        said = next(said for known, said in longest if known[: len(one.tokens)] == one.tokens)
        ids, logits = reference(up_to(said, len(one.tokens) - 1), one.tokens, len(one.drafts))
        for i, (draft, wanted) in enumerate(zip(one.drafts, ids.tolist(), strict=True)):
            second, first = np.sort(logits[i])[-2:]
            close = first - second < tolerance
            assert draft == wanted or close, f"draft {i} after {one.tokens}: {draft}, not {wanted} ({first - second})"
            compared += 1
            if draft != wanted:  # a tie, after which the reference goes on elsewhere
                break
    return compared


def states(folder: Path, tokens: Sequence[int]) -> Features:
    """What a Llama says of these tokens, computed by the references' own parts."""
    config, w = common.read_folder(folder)
    x, taps, eps = w["model.embed_tokens.weight"][tokens], {}, config["rms_norm_eps"]
    for i in range(config["num_hidden_layers"]):
        taps[i] = x
        x = common.layer(common.under(w, f"model.layers.{i}."), x, config)
    taps[config["num_hidden_layers"]] = x
    hidden = common.rms(x, w["model.norm.weight"], eps)
    return Features(w["model.embed_tokens.weight"], w["lm_head.weight"], hidden, taps)


def up_to(said: Features, n: int) -> Features:
    """The same of the first n positions."""
    return dataclasses.replace(said, hidden=said.hidden[:n], taps={i: x[:n] for i, x in said.taps.items()})
