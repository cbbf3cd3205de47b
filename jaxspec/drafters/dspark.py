"""DSpark: a drafting head that runs one pass over a block, as DFlash does, and then samples one draft after another.

The block is the pending token (accepted, not yet read by the target) and mask tokens. Each draft is sampled given the
token before it. A low-rank Markov head turns that token into an addition to the draft's logits. Without a Markov head
the drafts are sampled at once. The checkpoint's head that predicts acceptance is not used, because the engine's
adaptive K measures acceptance.

Source: DeepSeek-AI, "DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation",
https://github.com/deepseek-ai/DeepSpec. Checkpoint formats: DeepSpec's and the speculators library's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.cache.layer import LayerCache
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.errors import UnsupportedError
from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters import dflash
from jaxspec.drafters.base import Choose, History, ModelParams, Proposal, Rank
from jaxspec.drafters.chain import Place, Step, chain
from jaxspec.drafters.head_checkpoint import HeadCheckpoint
from jaxspec.drafters.trees.growth import Grown, Nodes, Shape, grow_tree
from jaxspec.models import families
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import module
from jaxspec.models.draft_spec import DraftSpec
from jaxspec.models.head import product, whole
from jaxspec.models.paged import PagedModel
from jaxspec.models.parameters import declare
from jaxspec.models.reading import Reading
from jaxspec.models.table import looked_up
from pallas_kernels.plain import argmax

# For each kind of Markov head: the inner projection's name in checkpoints ("" without one), and the projection's input
# size (besides the hidden state) and output size, both in multiples of the rank (`Config.markov_rank`).
KINDS = {"vanilla": ("", 0, 0), "gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 2, 3)}


@dataclasses.dataclass(frozen=True)
class Config(dflash.Config):
    """The architecture of a DSpark head.

    markov_rank: r, the number of channels between the previous token and the logits; 0 without a Markov head.
    markov_kind: kind of the Markov head, a key of KINDS.
    markov_table: whether a token's channels come from the Markov head's own table; else they are a projection of the
      target's embedding of the token.
    """

    markov_rank: int = 0
    markov_kind: str = "vanilla"
    markov_table: bool = True

    @property
    def spec(self) -> DraftSpec:
        return dataclasses.replace(super().spec, method="dspark")


class Markov(nnx.Module):
    """The Markov head, which computes an addition to a draft's logits from the token before the draft."""

    def __init__(self, config: Config, dtype: Any) -> None:
        c, rank, matrix = config, config.markov_rank, declare("matrix", dtype)
        self.config = c
        _, num_inputs, num_outputs = KINDS[c.markov_kind]
        if c.markov_table:
            self.before = declare("table", dtype)(c.vocab_size, rank, axes=("vocab", None))
        else:
            self.before_in = matrix(c.target_width, rank)
        self.after = matrix(rank, c.head_size, axes=(None, "vocab"), head=True)
        if num_outputs:
            self.inner = matrix(num_inputs * rank + c.width, num_outputs * rank)
            self.inner_bias = declare("bias", dtype)(num_outputs * rank)

    def __call__(
        self,
        state: Float[Array, "*k _"],
        token: Int[Array, "*k"],
        hidden: Float[Array, "*k _"],
        target: Any,
        backend: Backend,
    ) -> tuple[Float[Array, "*k _"], Float[Array, "*k _"]]:
        """Return the channels [..., r] that `logits` reads, and the next draft's state.

        state [..., r]: recurrent state after the previous draft; only kind "rnn" changes it.
        token i32[...]: token before this draft.
        hidden [..., E]: hidden state at this draft.
        target: the target, whose embedding table the Markov head may share.
        """
        c = self.config
        if c.markov_table:
            x = looked_up(self.before[...], token, backend)
        else:
            x = product(target.embedded(token, backend), self.before_in[...], backend).astype(hidden.dtype)
        if c.markov_kind != "vanilla":
            inputs = [hidden, x] if c.markov_kind == "gated" else [state, x, hidden]
            inner = product(jnp.concatenate(inputs, axis=-1), self.inner[...], backend) + self.inner_bias[...]
            if c.markov_kind == "gated":
                x = (jax.nn.sigmoid(inner) * x).astype(x.dtype)
            else:
                gate, new, out = jnp.split(inner, 3, axis=-1)
                gate = jax.nn.sigmoid(gate)
                state = (gate * state + (1 - gate) * jnp.tanh(new)).astype(state.dtype)
                x = jnp.tanh(out).astype(x.dtype)
        return x, state

    def logits(self, x: Float[Array, "*k _"], backend: Backend) -> Float[Array, "*k _"]:
        """Return the addition f32[..., V] to a draft's logits, computed from the channels x [..., r]."""
        return whole(product(x, self.after[...], backend), backend)


class DSparkHead(dflash.DFlashHead):
    """The network of a DSpark head: DFlash's layers, and a Markov head whose logits depend on the previous token."""

    config: Config

    def __init__(self, config: Config, dtype: Any) -> None:
        super().__init__(config, dtype)
        if config.markov_rank:
            self.markov = Markov(config, dtype)


module.register(Config, DSparkHead)


class After(Place):
    """The output head for one draft of the block, whose logits include the Markov head's addition.

    place: the arguments of `Place`, the output head for one draft of a block.
    added: the Markov head's addition to the logits: [B,V] for one previous token of each row, or [B,k,V] for k tree
      nodes of each row as previous tokens.
    """

    def __init__(self, place: tuple[Any, ...], added: Float[Array, "B *k V"]) -> None:
        super().__init__(*place)
        self.added = added

    def logits(self, x: Any, backend: Any) -> Any:
        place = super().logits(x, backend)
        if self.added.ndim != place.ndim:  # `added` holds one addition for each tree node
            place = place[:, None]
        return place + self.added

    def argmax_token(self, x: Any, backend: Any, vocab_size: int | None = None) -> Any:
        found = argmax(self.logits(x, backend)[..., :vocab_size])
        return found if self.vocabulary is None else jnp.take(self.vocabulary.d2t, found, mode="clip")


@dataclasses.dataclass(frozen=True)
class DSpark(dflash.DFlash):
    """A drafter that runs DFlash's pass over a block of the pending token and mask tokens.

    The drafts are sampled one after another, or all at once if the DSpark head has no Markov head.
    """

    @property
    def independent(self) -> bool:
        config: Any = self.model.config
        return not config.markov_rank

    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        if self.independent:
            return super().propose(params, cache, history, choose)
        block = self.block(params, cache, history)
        step, state = self.steps(block)
        drafts, probs, _ = chain(self.num_speculative_tokens, step(state, block.pending, 0), step, choose)
        return Proposal(drafts, probs, block.wanted, block.draft_len), block.pages

    def grow(
        self, params: ModelParams, cache: PagedKVCache, history: History, shape: Shape, rank: Rank
    ) -> tuple[Proposal, Grown, tuple[LayerCache, ...]]:
        block = self.block(params, cache, history)
        step, state = self.steps(block)

        def next_level(state: Array, nodes: Nodes, level: Any) -> Step:
            return step(jnp.take_along_axis(state, nodes.after[:, :, None], axis=1), nodes.tokens, level)

        first = step(state, block.pending, 0)
        first = first._replace(state=jnp.repeat(first.state[:, None], shape.width, axis=1))
        grown, _ = grow_tree(shape, first, next_level, rank)
        return Proposal(grown.tokens, None, block.wanted, block.draft_len), grown, block.pages

    def steps(self, block: dflash.Block) -> tuple[Callable[..., Step], jax.Array]:
        """Return a function step(state, token, i), and the state for its first call.

        The function computes the output head and hidden state from which draft i is chosen, given a state [B,r] of the
        Markov head and the previous token i32[B]. For k nodes of a draft tree the state is [B,k,r] and the tokens are
        i32[B,k].
        """
        markov, hidden, backend = block.head.markov, block.hidden, self.model.backend
        known: dict[Any, Any] = {}
        state = jnp.zeros((hidden.shape[0], block.head.config.markov_rank), hidden.dtype)
        if not block.head.config.from_pending:  # the pending token's output makes no draft, but updates the state
            _, state = markov(state, block.pending, hidden[:, 0], block.target, backend)
            hidden = hidden[:, 1:]

        def step(state: Array, token: Array, i: Any) -> Step:
            x = lax.dynamic_index_in_dim(hidden, i, axis=1, keepdims=False)
            if token.ndim == 2:
                x = jnp.repeat(x[:, None], token.shape[1], axis=1)
            channels, state = markov(state, token, x, block.target, backend)
            return Step(After((block.logits, hidden, known, i), markov.logits(channels, backend)), x, state)

        return step, state


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> DSpark:
    """Return the DSpark drafter. The arguments are those in `jaxspec.drafters.methods`."""
    return DSpark(k, most, models["draft"], models["target"])


def read(found: HeadCheckpoint) -> Reading:
    """Return the `Reading` of a DSpark checkpoint: the head's configuration and the names of its tensors."""
    stored = found.shapes.get("markov_head.markov_w1.weight", (0, 0))[-1]
    rank = found.whole("markov_rank", stored, "rare_width")
    kind = found.raw.get("markov_head_type") or "vanilla"
    if kind not in KINDS:
        raise UnsupportedError(f"{found.name}: markov_head_type={kind!r} is not supported: {', '.join(KINDS)} are")
    table = not found.has("markov_head.embed_in.weight")
    reading = dflash.read(
        found, Config, from_pending=True, markov_rank=rank, markov_kind=kind, markov_table=table or not rank
    )
    ignored = (*reading.ignored, "confidence_head.*")
    return dataclasses.replace(reading, names={**reading.names, **names(reading.config)}, ignored=ignored)


def names(config: Any) -> dict[str, families.Place]:
    """Return the parameter, as (name, part), that each tensor of the Markov head fills, by its name in checkpoints."""
    inner = KINDS[config.markov_kind][0]
    before = ("markov_w1.weight", "before") if config.markov_table else ("embed_in.weight", "before_in")
    places = [before, ("markov_w2.weight", "after")]
    if inner:
        places += [(f"{inner}.weight", "inner"), (f"{inner}.bias", "inner_bias")]
    return {f"markov_head.{name}": (f"markov.{place}", "") for name, place in places}
