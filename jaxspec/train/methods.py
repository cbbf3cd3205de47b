"""The registry of drafting methods that can be trained.

Each method is a module of this package that defines:

READS: whether the draft reads the target's hidden states.
TAKES: names of the shape options (`jaxspec.train.train_options`) that the method accepts.
new(options, target, counts, placement): returns the initial draft. Its trained parameters are float32. counts i64[V] is
  the number of occurrences of each id in the training data.
passes(configs, draft, target, batch, backend, k): runs the draft over a batch and returns `PassOutputs`. configs,
  draft, target and batch are those of `loss.loss_sums`.
heads(configs, draft, target, k): returns for each pass the module that computes logits from the pass's hidden states.
save(folder, params, config, fingerprint): writes the draft to a folder, and keeps the folder's other files. fingerprint
  is that of the target's tokenizer.
"""

from __future__ import annotations

import importlib
from typing import Any

METHODS = ("draft_model", "eagle3", "medusa", "mtp", "dflash", "dspark")


def implementation(method: str) -> Any:
    """Return the module of this package that trains a method."""
    return importlib.import_module(f"jaxspec.train.{method}")
