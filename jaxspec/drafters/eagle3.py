"""EAGLE-3: a drafting head, usually of one layer, over the next token and the inputs of a few layers of the target.

Source: Li et al., https://arxiv.org/abs/2503.01840. Formats: SafeAILab's, SpecForge's and the speculators library's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.common.shapes import Array, Float
from jaxspec.drafters.draft_model import in_parallel
from jaxspec.drafters.feature_chain import FeatureBlock, FeatureChain
from jaxspec.drafters.head_checkpoint import HEAD, RARE, TABLE, VERIFIER, HeadCheckpoint
from jaxspec.drafters.own import OwnParts
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import Layer, module, through
from jaxspec.models.draft_spec import DraftSpec, HeadConfig
from jaxspec.models.families import Place, layer_names
from jaxspec.models.head import product
from jaxspec.models.paged import PagedModel
from jaxspec.models.parameters import declare
from jaxspec.models.reading import Reading
from jaxspec.models.rows import Rows
from pallas_kernels.plain import rms_norm


@dataclasses.dataclass(frozen=True)
class Config(HeadConfig):
    """The architecture of an EAGLE-3 head.

    Features are the concatenated inputs of the target's layers `taps`, projected to the head's width by fc.

    taps: layers of the target whose inputs the head reads.
    target_width: width of the target's layers.
    norm_before_fc: whether a norm over all concatenated inputs comes before fc.
    norm_taps: whether the input of each of these layers has its own norm before fc.
    norm_before_residual: whether the head's residual stream starts from the normed features.
    norm_output: whether the output that the next step reads as features is normed.
    has_table: whether the drafting head has its own embedding table; else the target's is used.
    has_head: whether the drafting head has its own output head; else the target's is used.
    mask_id: mask token of a head that drafts all tokens in one pass (P-EAGLE), which has learned features for it; None
      for other heads.
    """

    taps: tuple[int, ...] = ()
    target_width: int = 0
    norm_before_fc: bool = False
    norm_taps: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    has_table: bool = False
    has_head: bool = True

    @property
    def spec(self) -> DraftSpec:
        return DraftSpec("eagle3", self.width, self.taps, ("fc",), uses_target_head=not self.has_head)


class Eagle3Head(OwnParts):
    """The network of an EAGLE-3 head."""

    config: Config

    def __init__(self, config: Config, dtype: Any) -> None:
        super().__init__(config, dtype)
        c, matrix, norm = config, declare("matrix", dtype), declare("norm")
        self.fc = matrix(len(c.taps) * c.target_width, c.width, axes=(None, "features"))
        if c.norm_before_fc:
            self.input_norm = norm(len(c.taps) * c.target_width)
        if c.norm_taps:
            self.tap_norms = nnx.List([norm(c.target_width) for _ in c.taps])
        if c.mask_id is not None:
            self.mask_hidden = declare("bias", dtype)(1, 1, len(c.taps) * c.target_width)
        self.token_norm, self.hidden_norm = norm(c.width), norm(c.width)
        self.layers = nnx.List([Layer(c, i, dtype, entry=0 if i else 2 * c.width) for i in range(c.num_layers)])
        self.norm = norm(c.width)

    def features(
        self, hidden: Float[Array, "B T E"] | None, tapped: Sequence[Float[Array, "B T E"]], backend: Backend
    ) -> Float[Array, "B T M"]:
        """Compute the features to cache from `tapped`, the inputs [B,T,E] of the target's layers `taps`.

        Each position's concatenated inputs are projected to the drafting head's width.
        """
        return self.reduced(jnp.concatenate(tapped, axis=-1), backend)

    def reduced(self, x: Float[Array, "B T _"], backend: Backend) -> Float[Array, "B T E"]:
        """Project the concatenated inputs of the target's layers `taps` to the drafting head's width.

        The norms that the configuration names come before the projection.
        """
        c = self.config
        x = rms_norm(self.input_norm[...], x, c.norm_eps) if c.norm_before_fc else x
        if c.norm_taps:
            parts = zip(self.tap_norms, jnp.split(x, len(c.taps), axis=-1), strict=True)
            x = jnp.concatenate([rms_norm(w[...], part, c.norm_eps) for w, part in parts], axis=-1)
        return product(x, self.fc[...], backend).astype(x.dtype)

    def masks(self, backend: Backend) -> Float[Array, " M"]:
        """Return the learned features [M] of mask tokens, which all have the same."""
        return self.reduced(self.mask_hidden[...], backend)[0, 0]

    def __call__(
        self,
        x: Float[Array, "B T E"],
        feature: Float[Array, "B T M"],
        pages: tuple[Any, ...],
        rows: Rows,
        backend: Backend,
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T M"], tuple[Any, ...]]:
        c = self.config
        normed = rms_norm(self.hidden_norm[...], feature, c.norm_eps)
        both = jnp.concatenate([rms_norm(self.token_norm[...], x, c.norm_eps), normed], axis=-1)
        x = normed if c.norm_before_residual else feature
        x, hidden, pages, _ = through(list(self.layers), x, pages, rows, backend, norm=self.norm[...], entry=both)
        carried = hidden if c.norm_output else x
        return hidden, carried, pages


module.register(Config, Eagle3Head)


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> FeatureChain:
    """Return the EAGLE-3 drafter. The arguments are those in `jaxspec.drafters.methods`."""
    kind = FeatureBlock if in_parallel(models["draft"], speculative) else FeatureChain
    return kind(k, most, models["draft"], models["target"])


def read(found: HeadCheckpoint) -> Reading:
    """Return the `Reading` of an EAGLE-3 checkpoint: the head's configuration and the names of its tensors.

    Both config.json and the tensors determine the configuration. Names and shapes of tensors are seldom wrong. So they
    are used rather than config.json for all that they show, for example which norms the head has.
    """
    raw, target = found.raw, found.target
    target_width = found.whole("target_hidden_size", raw.get("hidden_size"), "width")
    found.fits("width", target_width, target.width)
    if raw.get("use_aux_hidden_state") is False:
        raise UnsupportedError(
            f"{found.name}: use_aux_hidden_state=false, a head that reads one layer, is not supported"
        )
    taps = found.taps((2, target.num_layers // 2, target.num_layers - 3))
    rows = found.shapes.get(found.prefix + "fc.weight", (0, 0))[-1]
    if rows != len(taps) * target_width:
        raise UserError(
            f"{found.name}: tensor fc.weight has {rows} inputs, but layers {list(taps)} of width {target_width} have "
            f"{len(taps) * target_width}: correct config.json"
        )
    fields, fills = found.layers(), found.has("mask_hidden")
    config = Config(**fields | {
        "reduced_vocab_size": found.shapes["d2t"][0] if found.has("d2t") else None,
        "taps": taps,
        "target_width": target_width,
        "norm_before_fc": found.has("input_norm."),
        "norm_taps": found.has("fc_norm.", "aux_norm_"),
        "norm_before_residual": found.flag("norm_before_residual", default=False),
        "norm_output": found.flag("norm_output", default=False),
        "has_table": fields["width"] != target.width,
        "has_head": found.has("lm_head."),
        "mask_id": found.whole("ptd_token_id", raw.get("mask_token_id"), "token_id") if fills else None,
    } | found.own_table())  # fmt: skip
    if not config.has_head and config.width != target.width:
        raise UserError(f"{found.name}: tensor lm_head.weight is missing, and the target's head has another width")
    copied = VERIFIER if fields["width"] != target.width else (TABLE, *VERIFIER)
    return Reading(config, names(found), ("t2d",), copies=found.copies(*copied))


def places(first: str) -> dict[str, Place]:
    """Return the parameter, as (name, part), that each tensor of a checkpoint fills, by the tensor's name.

    first: prefix of the first layer's tensors, which differs between checkpoint writers.
    """
    return {
        **layer_names("layers.{}."),
        **layer_names(first, "layers.0."),
        first + "input_layernorm.weight": ("token_norm", ""),
        first + "hidden_norm.weight": ("hidden_norm", ""),
        TABLE: ("embed", ""),
        "fc.weight": ("fc", ""),
        "input_norm.weight": ("input_norm", ""),
        "norm.weight": ("norm", ""),
        HEAD: ("head", ""),
        **RARE,
        "d2t": ("d2t", ""),
        "mask_hidden": ("mask_hidden", ""),
    }


def names(found: HeadCheckpoint) -> dict[str, Place]:
    """Return the parameter, as (name, part), that each tensor of this checkpoint fills, by the tensor's name."""
    taps = {f"aux_norm_{name}.weight": (f"tap_norms.{i}", "") for i, name in enumerate(("low", "mid", "high"))}
    if not found.has("aux_norm_"):
        taps = {"fc_norm.{}.weight": ("tap_norms.{}", "")}
    return found.named({**places("midlayer." if found.has("midlayer.") else "layers.0."), **taps})
