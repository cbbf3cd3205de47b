"""Heads for a tiny target, of every method and kind."""

from __future__ import annotations

from jaxspec.models.backend import Backend
from jaxspec.train.methods import METHODS
from pallas_kernels.device import CPU
from tests.train import runs

K, LAYERS = 4, 6
BACKEND = Backend(CPU, None, "reference")
HEADS = METHODS[1:]
LEFT_OUT = dict.fromkeys(("layers", "width", "heads", "kv_heads", "mlp_width", "vocab_size"))  # of runs.options
# How a head is asked for here, and how one that has to learn a target by heart: with a vocabulary of its own or none.
SHAPES = {
    "eagle3": {"heads": 4, "mlp_width": 96, "vocab_size": 200},
    "medusa": {"layers": 2, "vocab_size": 200},
    "mtp": {},
    "dflash": {"heads": 4, "mlp_width": 96, "vocab_size": 200},
    "dspark": {"heads": 4, "mlp_width": 96, "vocab_size": 200, "markov_rank": 8},
    # With rare ids.
    "eagle3 of two layers": {"layers": 2, "heads": 4, "vocab_size": 200, "rare_ids": 80, "rare_width": 6},
    "dspark with all ids": {"layers": 1, "vocab_size": runs.VOCAB, "rare_ids": 100},
}
BY_HEART = {
    "eagle3": {"heads": 4, "mlp_width": 256, "vocab_size": runs.VOCAB},
    "medusa": {"layers": 2, "vocab_size": runs.VOCAB},
    "mtp": {},
    "dflash": {"heads": 4, "mlp_width": 256},
    "dspark": {"heads": 4, "mlp_width": 256},
}


def options(root, out, method, **changes):
    return runs.options(root, out, method=method, **LEFT_OUT | {"num_speculative_tokens": K} | changes)
