"""Medusa: one drafting head for each of the K drafts.

All heads read the target's last hidden state, independently of each other. Source: Cai et al.,
https://arxiv.org/abs/2401.10774. Checkpoint formats: the original's (Medusa-1: heads alone; Medusa-2: heads in the
target's own checkpoint) and vLLM's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.cache.layer import LayerCache
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.errors import UserError
from jaxspec.common.shapes import Array, Float
from jaxspec.drafters.base import Choose, History, ModelParams, Proposal
from jaxspec.drafters.chain import at_once
from jaxspec.drafters.head_checkpoint import HEAD, HeadCheckpoint
from jaxspec.drafters.last_feature import LastFeature
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import module
from jaxspec.models.draft_spec import DraftSpec, HeadConfig
from jaxspec.models.families import Place
from jaxspec.models.head import Head, product
from jaxspec.models.paged import PagedModel
from jaxspec.models.parameters import declare
from jaxspec.models.reading import Reading


@dataclasses.dataclass(frozen=True)
class Config(HeadConfig):
    """The architecture of Medusa heads.

    num_drafts: number of heads, one for each draft.
    depth: number of residual blocks of each head.
    bias: whether the residual blocks have a bias.
    has_head: whether each Medusa head has its own output matrix; else the target's is used.
    """

    num_drafts: int = 1
    depth: int = 1
    bias: bool = True
    has_head: bool = True

    cached_layers = ()

    @property
    def spec(self) -> DraftSpec:
        return DraftSpec("medusa", self.width, uses_target_head=not self.has_head, max_drafts=self.num_drafts)


class MedusaHead(Head):
    """The Medusa head of one draft."""

    def __init__(self, config: Config, dtype: Any) -> None:
        c = config
        self.config = c
        self.blocks = nnx.List([declare("matrix", dtype)(c.width, c.width) for _ in range(c.depth)])
        if c.bias:
            self.biases = nnx.List([declare("bias", dtype)(c.width) for _ in range(c.depth)])
        if c.has_head:
            self.head = declare("matrix", dtype)(c.width, c.head_size, axes=(None, "vocab"), head=True)

    def __call__(self, x: Float[Array, "*n E"], backend: Backend) -> Float[Array, "*n E"]:
        for j, block in enumerate(self.blocks):
            y = product(x, block[...], backend)
            if self.config.bias:
                y = y + self.biases[j][...]
            x = x + jax.nn.silu(y).astype(x.dtype)
        return x


class MedusaHeads(Head):
    """The Medusa heads of all drafts, which share a vocabulary."""

    def __init__(self, config: Config, dtype: Any) -> None:
        self.config = config
        self.declare_ids(config)
        self.heads = nnx.List([MedusaHead(config, dtype) for _ in range(config.num_drafts)])

    def one(self, i: int) -> MedusaHead:
        """Return the Medusa head of draft i. It gets the id tables of a reduced vocabulary, which all heads share."""
        chosen = self.heads[i]
        if self.config.reduced_vocab_size:
            chosen.d2t, chosen.t2d = self.d2t, self.t2d
        return chosen


module.register(Config, MedusaHeads)


@dataclasses.dataclass(frozen=True)
class Medusa(LastFeature):
    """A drafter that uses Medusa heads, one for each draft."""

    @property
    def independent(self) -> bool:
        return True

    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        config: Any = self.model.config
        if config.has_head:
            return super().propose(params, cache, history, choose)
        # Medusa heads without output matrices all use the target's output head, which therefore runs once for them.
        step, state, token = self.start(params, cache, history)
        places = [step(state, token, i) for i in range(self.num_speculative_tokens)]
        hidden = jnp.stack([place.hidden for place in places], axis=1)
        drafts, probs = at_once(places[0].head, hidden, choose)
        return Proposal(drafts, probs, self.wanted(history)), cache.draft

    def begin(self, head: Any, hidden: Any) -> Any:
        return hidden

    def draft(self, head: Any, state: Any, token: Any, i: int) -> tuple[Any, Any, Any]:
        one = head.one(i)
        output_head = one if one.config.has_head else None
        return output_head, one(state, self.model.backend), state


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> Medusa:
    """Return the Medusa drafter. The arguments are those in `jaxspec.drafters.methods`."""
    return Medusa(k, models["draft"], models["target"])


# For each checkpoint format: the tensor names of block j's weight and bias, and of the output matrix, in head i.
VLLM = ("blocks.{i}.layers.{j}.weight", "blocks.{i}.layers.{j}.bias", "lm_heads.{i}.weight")
FORMATS = (
    ("{i}.{j}.linear.weight", "{i}.{j}.linear.bias", "{i}.{depth}.weight"),
    ("medusa_head.{i}.{j}.linear.weight", "medusa_head.{i}.{j}.linear.bias", "medusa_head.{i}.{depth}.weight"),
    VLLM,
    (
        "medusa_heads.blocks.{i}.layers.{j}.weight",
        "medusa_heads.blocks.{i}.layers.{j}.bias",
        "medusa_heads.lm_heads.{i}.weight",
    ),
)


def places(names: tuple[str, str, str], heads: int, depth: int) -> dict[str, Place]:
    """Return the parameter, as (name, part), that each tensor of the Medusa heads fills, by the tensor's name.

    names: tensor names of the checkpoint's format, one entry of FORMATS.
    heads: number of heads.
    depth: number of residual blocks of each head.
    """
    block, bias, logits = names
    each = [(i, j) for i in range(heads) for j in range(depth)]
    return {
        **{block.format(i=i, j=j): (f"heads.{i}.blocks.{j}", "") for i, j in each},
        **{bias.format(i=i, j=j): (f"heads.{i}.biases.{j}", "") for i, j in each},
        **{logits.format(i=i, depth=depth): (f"heads.{i}.head", "") for i in range(heads)},
        "token_map": ("d2t", ""),
    }


def read(found: HeadCheckpoint) -> Reading:
    """Return the `Reading` of a Medusa checkpoint: the heads' configuration and the names of their tensors.

    The number of heads is counted from the tensors, because config.json often gives too few.
    """
    target = found.target
    found.refuse(logit_scale=1.0)
    names = next((f for f in FORMATS if f[0].format(i=0, j=0) in found.shapes), None)
    if names is None:
        raise UserError(f"{found.name} holds no Medusa heads ({FORMATS[0][0].format(i=0, j=0)}): take one that does")
    block, bias, logits = names
    most = len(found.shapes) + 1
    heads = next(i for i in range(most) if block.format(i=i, j=0) not in found.shapes)
    depth = next(j for j in range(most) if block.format(i=0, j=j) not in found.shapes)
    found.fits("width", found.shapes[block.format(i=0, j=0)][0], target.width)
    reduced = found.shapes["token_map"][0] if "token_map" in found.shapes else None
    own_head = logits.format(i=0, depth=depth) in found.shapes
    if own_head and not reduced:
        found.fits("vocabulary", found.shapes[logits.format(i=0, depth=depth)][0], target.vocab_size)
    config = Config(**vars(target) | {
        "tied": False,
        "reduced_vocab_size": reduced,
        "num_drafts": heads,
        "depth": depth,
        "bias": bias.format(i=0, j=0) in found.shapes,
        "has_head": own_head,
    })  # fmt: skip
    own = re.compile(r"^(medusa_heads?\.)?(\d+|blocks|lm_heads)\.|token_map$")
    rest = tuple(name for name in found.shapes if not own.match(name) and name != HEAD)  # the target's own, in Medusa-2
    return Reading(config, places(names, heads, depth), copies=found.copies(HEAD), rest=rest, absolute_ids=True)
