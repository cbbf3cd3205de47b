"""Multi-token prediction (MTP): a drafting head that is part of the target's checkpoint.

The head is one layer of the target's own kind, over the next token and the target's last hidden state. If a checkpoint
holds several such heads, the first is used for every draft. Sources: DeepSeek-V3, https://arxiv.org/abs/2412.19437;
MiMo, https://arxiv.org/abs/2505.07608.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxspec.common.errors import UserError
from jaxspec.common.shapes import Array, Float
from jaxspec.drafters.feature_chain import FeatureChain
from jaxspec.drafters.head_checkpoint import HEAD, TABLE, HeadCheckpoint
from jaxspec.drafters.own import OwnParts
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import Layer, module, through
from jaxspec.models.draft_spec import DraftSpec, HeadConfig
from jaxspec.models.families import FAMILIES, Place, layer_names
from jaxspec.models.head import product
from jaxspec.models.paged import PagedModel
from jaxspec.models.parameters import declare
from jaxspec.models.reading import Reading
from jaxspec.models.rows import Rows
from pallas_kernels.plain import rms_norm


@dataclasses.dataclass(frozen=True)
class Config(HeadConfig):
    """The architecture of a head for multi-token prediction.

    hidden_first: whether the target's hidden state comes before the token's embedding in the input of fc, the
      projection of both to the head's width.
    last_norm: whether the target's hidden state is taken after its last norm.
    target_layers: number of layers of the target.
    layers_there: number of heads for multi-token prediction in the checkpoint; the first is used.
    has_table: whether the drafting head has its own embedding table; else the target's is used.
    has_head: whether the drafting head has its own output head; else the target's is used.
    """

    hidden_first: bool = False
    last_norm: bool = True
    target_layers: int = 0
    layers_there: int = 1
    has_table: bool = False
    has_head: bool = False

    @property
    def spec(self) -> DraftSpec:
        taps = () if self.last_norm else (self.target_layers,)
        return DraftSpec("mtp", self.width, taps, uses_target_head=not self.has_head)


class MtpHead(OwnParts):
    """The network of a head for multi-token prediction: a projection and one decoder layer."""

    def __init__(self, config: Config, dtype: Any) -> None:
        super().__init__(config, dtype)
        c, norm = config, declare("norm")
        self.token_norm, self.hidden_norm, self.norm = norm(c.width), norm(c.width), norm(c.width)
        self.fc = declare("matrix", dtype)(2 * c.width, c.width)
        self.layers = nnx.List([Layer(c, 0, dtype)])

    def features(
        self, hidden: Float[Array, "B T E"], tapped: Sequence[Float[Array, "B T E"]], backend: Backend
    ) -> Float[Array, "B T M"]:
        return hidden if self.config.last_norm else tapped[0]

    def __call__(
        self,
        x: Float[Array, "B T E"],
        feature: Float[Array, "B T M"],
        pages: tuple[Any, ...],
        rows: Rows,
        backend: Backend,
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T M"], tuple[Any, ...]]:
        c = self.config
        parts = [rms_norm(self.token_norm[...], x, c.norm_eps), rms_norm(self.hidden_norm[...], feature, c.norm_eps)]
        both = jnp.concatenate(parts[::-1] if c.hidden_first else parts, axis=-1)
        x = product(both, self.fc[...], backend).astype(x.dtype)
        _, hidden, pages, _ = through(list(self.layers), x, pages, rows, backend, norm=self.norm[...])
        return hidden, hidden, pages


module.register(Config, MtpHead)


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> FeatureChain:
    """Return the drafter that uses multi-token prediction. The arguments are those in `jaxspec.drafters.methods`."""
    return FeatureChain(k, most, models["draft"], models["target"])


@dataclasses.dataclass(frozen=True)
class Format:
    """The names that one family of checkpoints gives to the tensors of its head for multi-token prediction.

    prefix: prefix of all tensor names of the head.
    token_norm, hidden_norm, fc, norm: tensor names of these four parameters, after `prefix`.
    layer: prefix of the decoder layer's tensor names, after `prefix`.
    hidden_first, last_norm: the values of these fields in Config.
    norm_plus_one: whether a norm's weights are stored as their difference from 1.
    """

    prefix: str
    token_norm: str
    hidden_norm: str
    fc: str
    norm: str
    layer: str = ""
    hidden_first: bool = False
    last_norm: bool = True
    norm_plus_one: bool = False


OWN_HEADS = ("shared_head.head.weight", HEAD)  # tensor names of an output head in checkpoints, after the prefix
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.")


def formats(num_layers: int) -> dict[str, Format]:
    """Return the tensor names of each family of checkpoints.

    num_layers: number of layers of the target. DeepSeek numbers the drafting head as the next layer after these.

    With MiMo's checkpoints, MiMo's own code and vLLM's code read the hidden state before the target's last norm. So
    last_norm is False for them.
    """
    return {
        "deepseek": Format(f"model.layers.{num_layers}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
        "mimo": Format("model.mtp_layers.0.", *MIMO, hidden_first=True, last_norm=False),
        "qwen3_next": Format("mtp.", *QWEN, norm_plus_one=True),
    }


def read(found: HeadCheckpoint) -> Reading:
    """Return the `Reading` of the head in a target's checkpoint: its configuration and the names of its tensors.

    Raises:
      UserError: the checkpoint holds no head for multi-token prediction.
    """
    target = found.target
    known = formats(target.num_layers).values()
    how = next((f for f in known if f"{f.prefix}{f.fc}.weight" in found.shapes), None)
    if how is None:
        for name in found.shapes:
            other_layer = re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", name)
            if other_layer:
                found.fits("layers", int(other_layer[1]), target.num_layers)
        raise UserError(f"{found.name} holds no head for multi-token prediction: take a checkpoint that has one")
    found.fits("vocabulary", found.vocab_size, target.vocab_size)
    found.fits("width", found.shapes[f"{how.prefix}{how.fc}.weight"][0], target.width)
    kept = {key: value for key, value in vars(target).items() if key not in ("reduced_vocab_size", "windows")}
    there = layers_there(how, found.shapes)
    own_table = {"has_table": True} if found.own(how.prefix + TABLE) else {}
    config = Config(**kept | {
        "num_layers": 1,
        "windows": (None,),
        "tied": False,
        "qkv_bias": f"{how.prefix}{how.layer}self_attn.q_proj.bias" in found.shapes,
        "qk_norm": f"{how.prefix}{how.layer}self_attn.q_norm.weight" in found.shapes,
        "output_gate": f"{how.prefix}{how.layer}self_attn.gate_proj.weight" in found.shapes,
        "hidden_first": how.hidden_first,
        "last_norm": how.last_norm,
        "target_layers": target.num_layers,
        "layers_there": len(there),
        "has_head": any(found.own(how.prefix + name) for name in OWN_HEADS),
    } | own_table)  # fmt: skip
    count = len(there)
    copies = copied(how, found)
    remark = f"{found.name} has {count} layers for multi-token prediction: the first makes every draft, the others none"
    own = {name: ("embed" if name.endswith(TABLE) else "head", "") for name in copies if name in found.differing}
    return Reading(
        config,
        names(how, target.family) | own,
        ignored=tuple(f"{layer}*" for layer in there[1:]),
        copies=copies,
        rest=tuple(name for name in found.shapes if not name.startswith((how.prefix, *there))),
        norm_plus_one=how.norm_plus_one,
        remark=remark if count > 1 else "",
    )


def copied(how: Format, found: HeadCheckpoint) -> dict[str, Place]:
    """Return the target's parameter that replaces each copy of the target's embedding table and output head.

    The result's keys are the names of the copies in the checkpoint.
    """
    head = "embed" if found.target.tied else "head"
    replacements = {TABLE: "embed"} | dict.fromkeys(OWN_HEADS, head)
    return {how.prefix + name: (place, "") for name, place in replacements.items() if how.prefix + name in found.shapes}


def names(how: Format, family: str) -> dict[str, Place]:
    """Return the parameter, as (name, part), that each tensor of the head fills, by the tensor's name.

    family: the target's model family, whose names the head's decoder layer uses.
    """
    ends = {"token_norm": how.token_norm, "hidden_norm": how.hidden_norm, "fc": how.fc, "norm": how.norm}
    renamed = {name.removeprefix("model.layers.{}."): place for name, place in FAMILIES[family].names.items()}
    return {
        **layer_names(how.prefix + how.layer, "layers.0."),
        **{how.prefix + how.layer + name: (place.format(0), part) for name, (place, part) in renamed.items()},
        **{f"{how.prefix}{end}.weight": (place, "") for place, end in ends.items()},
    }


def layers_there(how: Format, tensors: Iterable[str]) -> list[str]:
    """Return the tensor-name prefix of each head for multi-token prediction in a checkpoint, in order.

    The heads are numbered consecutively. The format `how` names the first.
    """
    stem, first = re.fullmatch(r"(.*\.)(\d+)\.", how.prefix + how.layer).groups()  # type: ignore[union-attr]
    found = [re.match(rf"{re.escape(stem)}(\d+)\.", name) for name in tensors]
    numbers = {int(match[1]) for match in found if match}
    return [f"{stem}{number}." for number in sorted(numbers) if number >= int(first)]
