"""What `jaxspec train-draft` is told: the draft's shape, the loss, the optimiser, how long and how often."""

from __future__ import annotations

import math
from pathlib import Path

from jaxspec.common.errors import UserError
from jaxspec.common.values import LARGEST_ON_HOST, one_of, options, whole
from jaxspec.options.engine import DTYPES
from jaxspec.train.data_options import shares
from jaxspec.train.methods import METHODS

LOSSES = ("kl", "rkl", "tv")
# Forward KL teaches from the first step on, where total variation, which is what is wanted (1 - acceptance), has next
# to no gradient on tokens that the draft finds unlikely; total variation then spends a small draft's capacity on the
# tokens that decide acceptance.
DEFAULT_LOSS = "kl:1,tv:1"


@options
class TrainOptions:
    """How a draft is built and distilled.

    The first sentence of each is the command line's help.

    Args:
      data: The folder of training data that the target wrote.
      out: The folder to write; it is then the draft's name.
      target: The model that the draft is for.
      method: draft_model, eagle3, mtp, medusa, dflash or dspark. The first is a small model of its own, the others are
        heads that read the target: eagle3 and mtp draft one token from the other, medusa and dflash all at once, dspark
        too, but for a small part that knows the token before.
      layers: Of the draft; two. Of eagle3: one. Of medusa: of each of its heads; one.
      width: Of the draft; two thirds of the target's.
      heads: Query heads; as many as fit the width. Their size is always the target's.
      kv_heads: Key-value heads; as the target's where they divide.
      mlp_width: In proportion to the width.
      vocab_size: Ids that it can propose, the most frequent ones; 16384, of eagle3 32000, or all there are.
        It reads all, in the target's own table. medusa, dflash and dspark propose all by the target's own head, unless
        told otherwise.
      rare_ids: The rarest of them, by a narrower way; half. Their logits cost less. None where the draft has all ids,
        and of a head.
      rare_width: Of that way; a quarter of the width.
      markov_rank: Channels of dspark between the token before and the logits; 64.
      init_from_target: Begin with the target's layers and embeddings. Evenly spaced layers, where the shapes agree;
        embeddings projected where the widths differ. False: random.
      init_from: Begin with this draft, and train it further. Its shape and its vocabulary stay, but for more layers,
        which add nothing at first.
      top_n: Likeliest ids that the target teaches, found once; 0: all, in every step. Default: 64. They are kept on
        disk beside the data; all other ids count as one.
      keep_features: Find what a head reads of the target once, and keep it on disk. Else in every step. It takes two
        to four times the target's width for each token, beside the data, and is told before it is written.
      steps: Steps of the optimiser.
      minutes: Make only as many steps as fit.
      batch_size: Rows of a step.
      length: Tokens of a row.
      accumulate: Parts that a step's rows are computed in, for memory.
      loss: Shares of kl, rkl and tv. A weighted sum of forward and reverse KL and total variation, as "kl:1,tv:0.5".
      learning_rate: At its highest; a cosine takes it to a hundredth. Of Muon and Adam (step.py).
      warmup: Steps until it is reached. The way there is linear.
      weight_decay: Of the layers' matrices. Those are Muon's products.
      clip: Largest norm of the gradients.
      eval_every: Steps between measurements and checkpoints.
      eval_prompts: Held-out prompts of a measurement.
      eval_tokens: Longest answer to each.
      num_speculative_tokens: Drafts a round when measuring; a head learns as many.
      seed: Of the first weights and of the order of the data.
      dtype: auto, float32, bfloat16 or float16; masters are float32. "auto": as EngineConfig has it.
      resume: Go on where a run into --out was ended.

    Raises: UserError for a value out of its range.
    """

    data: Path
    out: Path
    target: str
    method: str = "draft_model"
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    mlp_width: int | None = None
    vocab_size: int | None = None
    rare_ids: int | None = None
    rare_width: int | None = None
    markov_rank: int | None = None
    init_from_target: bool = True
    init_from: str | None = None
    top_n: int | None = None
    keep_features: bool = False
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
            whole(name, getattr(self, name), 1)
        for name in ("layers", "width", "heads", "kv_heads", "mlp_width", "rare_width", "markov_rank"):
            if (value := getattr(self, name)) is not None:
                whole(name, value, 1)
        for name, least in {"vocab_size": 2, "rare_ids": 0}.items():
            if (value := getattr(self, name)) is not None:
                whole(name, value, least)
        whole("length", self.length, 2)
        whole("num_speculative_tokens", self.num_speculative_tokens, 1)
        whole("warmup", self.warmup, 0)
        if self.top_n is not None:
            whole("top_n", self.top_n, 0)
        whole("seed", self.seed, 0, LARGEST_ON_HOST)
        for name in ("learning_rate", "clip", "minutes"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise UserError(f"{name}={value} must be above 0, and finite")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"weight_decay={self.weight_decay} must be 0 or more, and finite")
        if self.batch_size % self.accumulate:
            raise UserError(f"accumulate={self.accumulate} does not divide batch_size={self.batch_size}")
        if self.init_from and not self.init_from_target:
            raise UserError(f"init_from={self.init_from} and init_from_target=False exclude each other: leave one out")
        one_of("method", self.method, METHODS)
        one_of("dtype", self.dtype, DTYPES)
        loss_weights(self.loss)


def loss_weights(text: str) -> dict[str, float]:
    """ "kl:1,tv:0.5" -> {"kl": 1.0, "tv": 0.5}. Raises: UserError."""
    weights = shares("loss", text)
    for name, weight in weights.items():
        one_of("loss", name, LOSSES)
        if not 0 < weight < math.inf:
            raise UserError(f"loss {text}: the weight of {name} must be above 0")
    return weights
