"""Options of `jaxspec train-draft`: the draft's shape, the loss, the optimiser, steps and measurements."""

from __future__ import annotations

import math
from pathlib import Path

from jaxspec.common.errors import UserError
from jaxspec.common.values import LARGEST_ON_HOST, one_of, option, options, whole
from jaxspec.options.engine import DTYPES
from jaxspec.train.data_options import shares
from jaxspec.train.methods import METHODS

LOSSES = ("kl", "rkl", "tv")
# Default of the option loss. Total variation is the real objective (1 - acceptance), and spends a small draft's
# capacity on the tokens that decide acceptance. But it has almost no gradient on tokens to which the draft gives little
# probability. Forward KL has a gradient from the first step on. So the default is the sum of both.
DEFAULT_LOSS = "kl:1,tv:1"


@options
class TrainOptions:
    """Options for building and distilling a draft.

    Raises: UserError for a value out of its range.
    """

    data: Path = option("Folder of training data that the target wrote.")
    out: Path = option("Folder to write, which is then the draft's name.")
    target: str = option("The model that the draft is for.")
    method: str = option(
        "draft_model, eagle3, mtp, medusa, dflash or dspark. The first is a small model of its own; the others "
        "are heads that read the target's hidden states. eagle3 and mtp draft one token after another, medusa "
        "and dflash all at once. dspark drafts all at once too, but for a small part that reads the previous "
        "token.",
        default="draft_model",
    )
    layers: int | None = option(
        "Layers of the draft; by default 2, for eagle3 1. For medusa: blocks of each head, by default 1.",
        default=None,
    )
    width: int | None = option("Width of the draft; by default two thirds of the target's.", default=None)
    heads: int | None = option(
        "Query heads; by default as many as fit the width. Their size is always the target's.",
        default=None,
    )
    kv_heads: int | None = option(
        "Key-value heads; by default the greatest common divisor of the target's and the query heads.",
        default=None,
    )
    mlp_width: int | None = option("Width of the MLP; by default in proportion to the draft's width.", default=None)
    vocab_size: int | None = option(
        "Ids that the draft can propose, the most frequent ones; by default 16384, for eagle3 32000, or all "
        "there are. It reads all ids, in the target's own table. medusa, dflash and dspark by default propose "
        "all ids, with the target's own head.",
        default=None,
    )
    rare_ids: int | None = option(
        "Rarest of the draft's ids, with a narrower head; by default half. Their logits cost less. A draft with"
        " all ids, and a head, by default has none.",
        default=None,
    )
    rare_width: int | None = option(
        "Width of the head for rare ids; by default a quarter of the draft's width.",
        default=None,
    )
    markov_rank: int | None = option(
        "Channels from the previous token to the logits in dspark; by default 64.",
        default=None,
    )
    init_from_target: bool = option(
        "Start with the target's layers and embeddings. The layers are evenly spaced ones, where the shapes "
        "agree; the embeddings are projected if the widths differ. False: random.",
        default=True,
    )
    init_from: str | None = option(
        "Start with this draft, and train it further. Its shape and its vocabulary stay. More layers may be "
        "asked for, which add nothing at first.",
        default=None,
    )
    top_n: int | None = option(
        "Most probable next tokens that the target teaches, computed once; 0 for all, in every step. Default: "
        "64. They are kept on disk beside the data. All other ids count as one.",
        default=None,
    )
    keep_features: bool = option(
        "Compute the features that a head reads once, and keep them on disk. Otherwise every step computes "
        "them. For each token they take one or four vectors of the target's width, beside the data. The size is"
        " reported before it is written.",
        default=False,
    )
    steps: int = option("Steps of the optimiser.", default=2000)
    minutes: float | None = option(
        "Minutes that the command may take; only as many steps are made as fit.",
        default=None,
    )
    batch_size: int = option("Rows of a step.", default=32)
    length: int = option("Tokens of a row.", default=512)
    accumulate: int = option("Parts in which a step's rows are computed, to save memory.", default=1)
    loss: str = option(
        "Weights of kl, rkl and tv. The loss is the weighted sum of forward KL, reverse KL and total variation,"
        ' such as "kl:1,tv:0.5".',
        default=DEFAULT_LOSS,
    )
    learning_rate: float = option(
        "Highest learning rate; a cosine lowers it to a hundredth. It serves both Muon and Adam (step.py).",
        default=4e-3,
    )
    warmup: int = option("Steps until the highest learning rate. The rise is linear.", default=100)
    weight_decay: float = option(
        "Weight decay of the layers' matrices. These are the ones that Muon trains.",
        default=0.01,
    )
    clip: float = option("Largest norm of the gradients.", default=1.0)
    eval_every: int = option("Steps between measurements and checkpoints.", default=200)
    eval_prompts: int = option("Held-out prompts of a measurement.", default=32)
    eval_tokens: int = option("Longest answer to each prompt, in tokens.", default=64)
    num_speculative_tokens: int = option("Drafts per round in a measurement; a head learns as many.", default=4)
    seed: int = option("Random seed for the initial weights and the order of the data.", default=0)
    dtype: str = option(
        'Auto, float32, bfloat16 or float16; master parameters are float32. "auto": as in EngineConfig.',
        default="auto",
    )
    resume: bool = option("Resume the run that was stopped in --out.", default=False)

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
    """Parse the option loss, such as "kl:1,tv:0.5", into weights {"kl": 1.0, "tv": 0.5}. Raises: UserError."""
    weights = shares("loss", text)
    for name, weight in weights.items():
        one_of("loss", name, LOSSES)
        if not 0 < weight < math.inf:
            raise UserError(f"loss {text}: the weight of {name} must be above 0")
    return weights
