"""What `jaxspec train-draft` is told: the draft's shape, the loss, the optimiser, how long and how often."""

from __future__ import annotations

import math
from pathlib import Path

from jaxspec.config import DTYPES, at_least, one_of
from jaxspec.options import options
from jaxspec.train.data_options import shares

LOSSES = ("kl", "rkl", "tv")
# Forward KL teaches from the first step on, where total variation, which is what is wanted (1 - acceptance), has next
# to no gradient on tokens that the draft finds unlikely; total variation then spends a small draft's capacity on the
# tokens that decide acceptance.
DEFAULT_LOSS = "kl:1,tv:1"


@options
class TrainOptions:
    """How a draft is built and distilled.

    Args:
      layers, width, heads, kv_heads, mlp_width: the draft's shape; by default two layers of two thirds of the target's
        width and the rest in proportion. The head size is always the target's.
      vocab_size: ids that the draft can propose, the most frequent ones of the data; it reads all, in the target's own
        table. None: at most 16,384. rare_ids: the rarest so many of these have logits by way of rare_width channels,
        which costs less; by default half of them and a quarter of the width, and none where the draft has all ids.
      init_from_target: begin with the target's embeddings, projected where the widths differ, and with its layers,
        evenly spaced, where the shapes agree. False: random.
      init_from: begin with this draft instead, to train it further: its shape and its vocabulary stay.
      top_n: of the target's distribution, so many likeliest ids are found once, kept on disk beside the data and taught
        from; all other ids count as one. 0: all ids are, and the target is computed in every step.
      steps, minutes: ends after so many steps; where fewer fit into so many minutes, after those.
      batch_size, length: rows of a step and tokens of a row; accumulate: parts that a step's rows are computed in.
      loss: a weighted sum of "kl" (forward), "rkl" (reverse) and "tv" (total variation), as "kl:1,tv:0.5".
      learning_rate, warmup, weight_decay, clip: Muon and Adam (step.py) with a linear warm-up of `warmup` steps and a
        cosine down to a hundredth; weights of Muon's products decay, gradients are cut at the norm `clip`.
      eval_every: steps between measurements and checkpoints; eval_prompts, eval_tokens: held-out prompts that are
        answered then and the longest answer; num_speculative_tokens: K.
      dtype: that of the computation; masters are float32. "auto": as EngineConfig has it.

    Raises: ValueError for a value out of its range.
    """

    target: str
    data: Path
    out: Path
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    mlp_width: int | None = None
    vocab_size: int | None = None
    rare_ids: int | None = None
    rare_width: int | None = None
    init_from_target: bool = True
    init_from: str | None = None
    top_n: int = 64
    steps: int = 2000
    minutes: float | None = None
    batch_size: int = 32
    length: int = 512
    accumulate: int = 1
    loss: str = DEFAULT_LOSS
    learning_rate: float = 4e-3
    warmup: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    eval_every: int = 200
    eval_prompts: int = 32
    eval_tokens: int = 64
    num_speculative_tokens: int = 4
    seed: int = 0
    dtype: str = "auto"
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "eval_every", "eval_prompts", "eval_tokens"):
            at_least(name, getattr(self, name), 1)
        for name in ("layers", "width", "heads", "kv_heads", "mlp_width", "rare_width"):
            if (value := getattr(self, name)) is not None:
                at_least(name, value, 1)
        for name, least in {"vocab_size": 2, "rare_ids": 0}.items():
            if (value := getattr(self, name)) is not None:
                at_least(name, value, least)
        at_least("length", self.length, 2)
        at_least("num_speculative_tokens", self.num_speculative_tokens, 1)
        for name in ("warmup", "weight_decay", "seed", "top_n"):
            at_least(name, getattr(self, name), 0)
        if self.seed >= 1 << 63:
            raise ValueError(f"seed={self.seed} has more than 63 bits")
        for name in ("learning_rate", "clip", "minutes"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be above 0, and finite")
        if not self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay} must be finite")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate} does not divide batch_size={self.batch_size}")
        if self.init_from and not self.init_from_target:
            raise ValueError(f"init_from={self.init_from} and init_from_target=False exclude each other: leave one out")
        one_of("dtype", self.dtype, DTYPES)
        loss_weights(self.loss)


def loss_weights(text: str) -> dict[str, float]:
    """ "kl:1,tv:0.5" -> {"kl": 1.0, "tv": 0.5}. Raises: ValueError."""
    weights = shares("loss", text)
    for name, weight in weights.items():
        one_of("loss", name, LOSSES)
        if not 0 < weight < math.inf:
            raise ValueError(f"loss {text}: the weight of {name} must be above 0")
    return weights
