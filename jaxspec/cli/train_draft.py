"""jaxspec train-draft"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from jaxspec.cli.exits import keeping
from jaxspec.cli.fields import CommandOption, Fields
from jaxspec.cli.shared import MODEL_HELP
from jaxspec.common import embedded
from jaxspec.train.train_options import TrainOptions

NAMES = [field.name for field in dataclasses.fields(TrainOptions)]
OWN = {
    "target": CommandOption(default=embedded.MODEL, help=MODEL_HELP),
    "loss": CommandOption(default=None),
    "num_speculative_tokens": CommandOption(flags=("-k", "--num-speculative-tokens")),
}


def train_draft(
    options: Annotated[dict[str, Any], Fields(TrainOptions, NAMES, OWN)],
) -> None:
    """Distil a draft for a target. --out then names it: jaxspec generate --model TARGET --draft OUT."""
    chosen = TrainOptions(**options)
    from jaxspec.train.loop import kept, train

    with keeping(lambda: kept(chosen)):
        print(train(chosen))
