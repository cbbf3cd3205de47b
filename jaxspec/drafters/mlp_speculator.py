"""IBM's MLP speculator: a small recurrent network from the target's last hidden state and the tokens drafted so far.

Source: Wertheimer et al., https://arxiv.org/abs/2404.19124. Format: fms-extras'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.drafters.heads import Found
from jaxspec.drafters.last_feature import LastFeature
from jaxspec.models.decoder import module
from jaxspec.models.draft_spec import DraftSpec, HeadConfig
from jaxspec.models.head import Head, product
from jaxspec.models.paged import PagedModel
from jaxspec.models.parameters import declare
from jaxspec.models.reading import Reading
from jaxspec.models.table import looked_up
from pallas_kernels.plain import rms_norm

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Config(HeadConfig):
    """target_width: of the target; num_drafts: tokens that it predicts; tied_steps: all share a table, a norm, a head
    and, but for the first, a projection; scale_input: the target's state is normed first. width is the inner one."""

    target_width: int = 0
    num_drafts: int = 1
    tied_steps: bool = False
    scale_input: bool = False

    cached_layers = ()

    @property
    def spec(self) -> DraftSpec:
        return DraftSpec("mlp_speculator", self.target_width, max_drafts=self.num_drafts)


class Step(Head):
    """What one step has of its own. entry: the width of the state that it reads; others: whether it has more than the
    projection of that."""

    def __init__(self, config: Config, dtype: Any, entry: int, *, others: bool) -> None:
        c = config
        self.config = c
        self.proj = declare("matrix", dtype)(entry, c.width)
        if others:
            self.embed = declare("table", dtype)(c.vocab_size, c.width, axes=("vocab", None))
            self.norm, self.norm_bias = declare("norm")(c.width), declare("norm")(c.width)
            self.declare_head(c, dtype)


class Speculator(nnx.Module):
    def __init__(self, config: Config, dtype: Any) -> None:
        c = config
        self.config = c
        own = 2 if c.tied_steps and c.num_drafts > 1 else c.num_drafts
        entry = lambda i: c.width if i else c.target_width
        others = lambda i: not (i and c.tied_steps)
        self.steps = nnx.List([Step(c, dtype, entry(i), others=others(i)) for i in range(own)])

    def __call__(self, state, token, i: int, backend):
        """state [B,E], token i32[B] -> (what has the logits, the next state)."""
        c = self.config
        own = self.steps[min(i, len(self.steps) - 1)]
        rest = self.steps[0] if c.tied_steps else own
        weight = 0.5 ** (0.5 / c.num_drafts)
        x = product(state, own.proj[...], backend)
        share = ((1 - weight**2) * c.width / 2) ** 0.5 / weight
        x = x + share * looked_up(rest.embed[...], token, backend).astype(jnp.float32)
        x = rms_norm(rest.norm[...], x, EPS) + rest.norm_bias[...]
        return rest, jax.nn.gelu(x, approximate=False).astype(state.dtype)


module.register(Config, Speculator)


@dataclasses.dataclass(frozen=True)
class MlpSpeculator(LastFeature):
    def begin(self, head, hidden):
        if not head.config.scale_input:
            return hidden
        return rms_norm(jnp.full(hidden.shape[-1:], 0.5**0.5, jnp.float32), hidden, EPS)

    def draft(self, head, state, token, i):
        logits, state = head(state, token, i, self.model.backend)
        return logits, state, state


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> MlpSpeculator:
    return MlpSpeculator(k, models["draft"], models["target"])


def read(found: Found) -> Reading:
    count, entry = found.whole("n_predict"), found.whole("emb_dim", kind="width")
    tied = found.flag("tie_weights", default=False)
    found.fits("width", entry, found.target.width)
    found.fits("vocabulary", found.whole("vocab_size", found.target.vocab_size), found.target.vocab_size)
    config = Config(**vars(found.target) | {
        "width": found.whole("inner_dim", 0, "rare_width") or entry,
        "target_width": found.target.width,
        "num_drafts": count,
        "tied": False,
        "tied_steps": tied,
        "scale_input": found.flag("scale_input", default=False),
    })  # fmt: skip
    parts = {"emb.{}.weight": "embed", "proj.{}.weight": "proj", "head.{}.weight": "head"}
    parts |= {"ln.{}.weight": "norm", "ln.{}.bias": "norm_bias"}
    prefix = "speculator." if found.has("speculator.") else ""
    names = {prefix + name: (f"steps.{{}}.{place}", "") for name, place in parts.items()}
    # A tied one's file lists each tensor for every step; the first projection is another than the later ones.
    shared = {name: 1 if "proj." in name else 0 for name in names} if tied else {}
    later = lambda first: range(first + 1, config.num_drafts)
    repeats = {name.format(i): name.format(first) for name, first in shared.items() for i in later(first)}
    return Reading(config, names, repeats=repeats)
