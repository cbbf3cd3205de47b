"""EAGLE-1: a drafting head, usually of one layer, over the next token and the target's last hidden state.

The target's output head computes the logits, unless the drafting head has its own.

Source: Li et al., https://arxiv.org/abs/2401.15077. Formats: SafeAILab's, and vLLM's with the prefix `model.`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxspec.common.shapes import Array, Float
from jaxspec.drafters.feature_chain import FeatureChain
from jaxspec.drafters.head_checkpoint import HEAD, TABLE, HeadCheckpoint
from jaxspec.drafters.own import OwnParts
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import Layer, module, through
from jaxspec.models.draft_spec import DraftSpec, HeadConfig
from jaxspec.models.families import layer_names
from jaxspec.models.head import product
from jaxspec.models.paged import PagedModel
from jaxspec.models.parameters import declare
from jaxspec.models.reading import Reading
from jaxspec.models.rows import Rows


@dataclasses.dataclass(frozen=True)
class Config(HeadConfig):
    """The architecture of an EAGLE-1 head.

    bias: whether fc, the projection of embedding and hidden state, has a bias.
    has_table: whether the drafting head has its own embedding table; else the target's is used.
    has_head: whether the drafting head has its own output head; else the target's is used.
    """

    bias: bool = True
    has_table: bool = False
    has_head: bool = False

    @property
    def spec(self) -> DraftSpec:
        return DraftSpec("eagle", self.width, uses_target_head=not self.has_head)


class EagleHead(OwnParts):
    """The network of an EAGLE-1 head."""

    config: Config

    def __init__(self, config: Config, dtype: Any) -> None:
        super().__init__(config, dtype)
        c = config
        self.fc = declare("matrix", dtype)(2 * c.width, c.width)
        if c.bias:
            self.fc_bias = declare("bias", dtype)(c.width)
        # The first layer has no norm before its attention.
        self.layers = nnx.List([Layer(c, i, dtype, entry=0 if i else c.width) for i in range(c.num_layers)])

    def features(
        self, hidden: Float[Array, "B T E"], tapped: Sequence[Float[Array, "B T E"]], backend: Backend
    ) -> Float[Array, "B T M"]:
        return hidden

    def __call__(
        self,
        x: Float[Array, "B T E"],
        feature: Float[Array, "B T M"],
        pages: tuple[Any, ...],
        rows: Rows,
        backend: Backend,
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T M"], tuple[Any, ...]]:
        mixed = product(jnp.concatenate([x, feature], axis=-1), self.fc[...], backend)
        x = (mixed + self.fc_bias[...] if self.config.bias else mixed).astype(x.dtype)
        x, _, pages, _ = through(list(self.layers), x, pages, rows, backend, entry=x)
        return x, x, pages  # EAGLE-1 has no norm before the output head


module.register(Config, EagleHead)


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> FeatureChain:
    """Return the EAGLE-1 drafter. The arguments are those in `jaxspec.drafters.methods`."""
    return FeatureChain(k, most, models["draft"], models["target"])


def read(found: HeadCheckpoint) -> Reading:
    """Return the `Reading` of an EAGLE-1 checkpoint: the head's configuration and the names of its tensors."""
    found.refuse(skip_prenorm=True, skip_output_norm=True, add_para_norm=False)
    fields, has_head = found.layers(), found.has("lm_head.")
    found.fits("width", fields["width"], found.target.width)
    config = Config(**fields | {
        "bias": found.has("fc.bias"),
        "has_head": has_head,
        "reduced_vocab_size": found.shapes["token_map"][0] if found.has("token_map") else None,
    } | found.own_table())  # fmt: skip
    names = {
        **layer_names("layers.{}."),
        "fc.weight": ("fc", ""),
        "fc.bias": ("fc_bias", ""),
        HEAD: ("head", ""),
        "token_map": ("d2t", ""),
    } | ({TABLE: ("embed", "")} if config.has_table else {})  # fmt: skip
    first = (found.prefix + "layers.0.input_layernorm.weight",)
    skipped = found.flag("skip_prenorm", default=False)  # whether layer 0's input norm is unused, in vLLM's format
    return Reading(
        config,
        found.named(names),
        ignored=first if skipped else (),
        copies=found.copies(TABLE),
        ones=() if skipped else first,
        absolute_ids=True,
    )
