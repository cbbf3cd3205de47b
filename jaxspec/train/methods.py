"""The methods that can be trained: the one place that lists them. What a method is stands in its file:

READS: whether it reads what the target computes of the tokens;
TAKES: the options of its shape (`jaxspec.train.options`) that it has a use for;
new(options, target, counts, placement) -> the draft as it begins, its parameters in float32, all but those of `fixed`;
  counts i64[V], how often each id occurs;
passes(configs, draft, target, batch, backend, k) -> `Said`; configs, draft, target and batch as in `loss.loss_sums`;
heads(configs, draft, target, k) -> what has the logits of each of the passes;
save(folder, params, config, fingerprint), beside what the folder holds.
"""

from __future__ import annotations

import importlib
from typing import Any

METHODS = ("draft_model", "eagle3", "medusa", "mtp", "dflash", "dspark")


def implementation(method: str) -> Any:
    """The method's file."""
    return importlib.import_module(f"jaxspec.train.{method}")
