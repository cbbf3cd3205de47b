"""IBM's MLP speculator: a small recurrent network over the target's last hidden state and the tokens drafted so far.

Source: Wertheimer et al., https://arxiv.org/abs/2404.19124. Checkpoint format: that of the library fms-extras.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters.head_checkpoint import HeadCheckpoint
from jaxspec.drafters.last_feature import LastFeature
from jaxspec.models.backend import Backend
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
    """The architecture of an MLP speculator. `width` is the width of its recurrent state.

    target_width: width of the target's hidden states.
    num_drafts: number of tokens that the speculator predicts, one in each step.
    tied_steps: whether all steps share an embedding table, a norm, an output head, and (except the first step) a
      projection.
    scale_input: whether the target's hidden state is normed before the first step.
    """

    target_width: int = 0
    num_drafts: int = 1
    tied_steps: bool = False
    scale_input: bool = False

    cached_layers = ()

    @property
    def spec(self) -> DraftSpec:
        return DraftSpec("mlp_speculator", self.target_width, max_drafts=self.num_drafts)


class Step(Head):
    """The parameters of one step of the recurrent network, which predicts one token.

    entry: width of the state that the step reads.
    others: whether the step also has its own embedding table, norm and output head, besides the state's projection.
    """

    def __init__(self, config: Config, dtype: Any, entry: int, *, others: bool) -> None:
        c = config
        self.config = c
        self.proj = declare("matrix", dtype)(entry, c.width)
        if others:
            self.embed = declare("table", dtype)(c.vocab_size, c.width, axes=("vocab", None))
            self.norm, self.norm_bias = declare("norm")(c.width), declare("norm")(c.width)
            self.declare_head(c, dtype)


class Speculator(nnx.Module):
    """The recurrent network of an MLP speculator."""

    def __init__(self, config: Config, dtype: Any) -> None:
        c = config
        self.config = c
        # The first step has its own projection. Tied steps share all else, so the first two steps hold all parameters.
        count = 2 if c.tied_steps and c.num_drafts > 1 else c.num_drafts
        first = Step(c, dtype, c.target_width, others=True)
        later = [Step(c, dtype, c.width, others=not c.tied_steps) for _ in range(1, count)]
        self.steps = nnx.List([first, *later])

    def __call__(
        self, state: Float[Array, "*n _"], token: Int[Array, "*n"], i: int, backend: Backend
    ) -> tuple[Any, Float[Array, "*n _"]]:
        """Run step i on a state [B,E] and the previous token i32[B].

        Return the step that holds the output head, and the next state, from which that head computes the logits.
        """
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
    """A drafter that uses an MLP speculator."""

    def begin(self, head: Any, hidden: Any) -> Any:
        if not head.config.scale_input:
            return hidden
        return rms_norm(jnp.full(hidden.shape[-1:], 0.5**0.5, jnp.float32), hidden, EPS)

    def draft(self, head: Any, state: Any, token: Any, i: int) -> tuple[Any, Any, Any]:
        logits, state = head(state, token, i, self.model.backend)
        return logits, state, state


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> MlpSpeculator:
    """Return the drafter that uses an MLP speculator. The arguments are those in `jaxspec.drafters.methods`."""
    return MlpSpeculator(k, models["draft"], models["target"])


def read(found: HeadCheckpoint) -> Reading:
    """Return the `Reading` of an MLP speculator's checkpoint: its configuration and the names of its tensors."""
    count = found.whole("n_predict")
    entry = found.whole("emb_dim", kind="width")
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
    repeats: dict[str, str] = {}
    if tied:  # a checkpoint repeats each shared tensor for every step
        for name in names:
            first = 1 if "proj." in name else 0  # the first step has its own projection
            repeats |= {name.format(i): name.format(first) for i in range(first + 1, config.num_drafts)}
    return Reading(config, names, repeats=repeats)
