"""jaxspec train-draft"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli.exits import keeping
from jaxspec.cli.shared import EMBEDDED, MODEL_HELP


def train_draft(
    data: Annotated[Path, typer.Option(help="The folder of training data that the target wrote.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it is then the draft's name.")],
    target: Annotated[str, typer.Option(help=MODEL_HELP)] = EMBEDDED,
    layers: Annotated[int | None, typer.Option(help="Of the draft; two.")] = None,
    width: Annotated[int | None, typer.Option(help="Of the draft; two thirds of the target's.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads; as many as fit the width.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key-value heads; as the target's where they divide.")] = None,
    mlp_width: Annotated[int | None, typer.Option(help="In proportion to the width.")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Ids that it can propose, the most frequent ones; at most 16384.")
    ] = None,
    rare_ids: Annotated[int | None, typer.Option(help="The rarest of them, by a narrower way; half.")] = None,
    rare_width: Annotated[int | None, typer.Option(help="Of that way; a quarter of the width.")] = None,
    init_from_target: Annotated[bool, typer.Option(help="Begin with the target's layers and embeddings.")] = True,
    init_from: Annotated[str | None, typer.Option(help="Begin with this draft, and train it further.")] = None,
    top_n: Annotated[
        int, typer.Option(help="Likeliest ids that the target teaches, found once; 0: all, in every step.")
    ] = 64,
    steps: Annotated[int, typer.Option(help="Steps of the optimiser.")] = 2000,
    minutes: Annotated[float | None, typer.Option(help="Make only as many steps as fit.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of a step.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
    accumulate: Annotated[int, typer.Option(help="Parts that a step's rows are computed in, for memory.")] = 1,
    loss: Annotated[str | None, typer.Option(help="Shares of kl, rkl and tv: kl:1,tv:1.")] = None,
    learning_rate: Annotated[float, typer.Option(help="At its highest; a cosine takes it to a hundredth.")] = 4e-3,
    warmup: Annotated[int, typer.Option(help="Steps until it is reached.")] = 100,
    weight_decay: Annotated[float, typer.Option(help="Of the layers' matrices.")] = 0.01,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradients.")] = 1.0,
    eval_every: Annotated[int, typer.Option(help="Steps between measurements and checkpoints.")] = 200,
    eval_prompts: Annotated[int, typer.Option(help="Held-out prompts of a measurement.")] = 32,
    eval_tokens: Annotated[int, typer.Option(help="Longest answer to each.")] = 64,
    k: Annotated[int, typer.Option("-k", "--num-speculative-tokens", help="Drafts a round when measuring.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the order of the data.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16; masters are float32.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run into --out was ended.")] = False,
) -> None:
    """Distil a draft for a target. --out then names it: jaxspec generate --model TARGET --draft OUT."""
    given = dict(locals())
    from jaxspec.train.options import DEFAULT_LOSS, TrainOptions

    names = {field.name for field in dataclasses.fields(TrainOptions)}
    chosen = {name: value for name, value in given.items() if name in names}
    options = TrainOptions(**chosen | {"loss": loss or DEFAULT_LOSS, "num_speculative_tokens": k})
    from jaxspec.train.loop import kept, train

    with keeping(lambda: kept(options)):
        print(train(options))
