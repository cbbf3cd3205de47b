"""The methods that can be trained: the one place that lists them. What a method is stands in its file:

AHEAD: how many places after its entry stands the token that an entry predicts; READS: whether it reads what the target
  computes of the tokens, in every step;
new(options, target, counts, placement) -> the draft as it begins, its parameters in float32, all but those of `fixed`;
  counts i64[V], how often each id occurs;
passes(configs, draft, target, tokens, backend, k) -> (hidden [B,T,J,E], of J passes over the same entries; what the
  target's logits are made of [B,T,E], or None where nothing was computed of it). configs, draft, target: of
  `loss.loss_sums`;
shares(k) -> of the J passes' losses;
save(folder, params, config, fingerprint), beside what the folder holds.
"""

from __future__ import annotations

import importlib
from typing import Any

METHODS = ("draft_model", "eagle3")


def implementation(method: str) -> Any:
    """The method's file."""
    return importlib.import_module(f"jaxspec.train.{method}")
