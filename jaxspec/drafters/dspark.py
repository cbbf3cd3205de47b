"""DSpark: DFlash's block, whose places are sampled one after another, each knowing the token before it.

What that token says of the next is added to the logits, by way of few channels. Source: DeepSeek-AI, "DSpark:
Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation", https://github.com/deepseek-ai/DeepSpec.
Formats: DeepSpec's and the speculators library's. A head that foretells acceptance is not used: adaptive K measures it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.drafters import dflash
from jaxspec.drafters.chain import Place, Step, chain
from jaxspec.drafters.heads import Found, Reading
from jaxspec.errors import UnsupportedError
from jaxspec.models.decoder import module
from jaxspec.models.head import product, whole
from jaxspec.models.paged import PagedModel
from jaxspec.models.parameters import declare
from pallas_kernels.plain import likeliest

# Kind of the head -> what files call its inner product, how many times the rank that reads beside the hidden state, and
# how many times the rank it gives.
KINDS = {"vanilla": ("", 0, 0), "gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 2, 3)}


@dataclasses.dataclass(frozen=True)
class Config(dflash.Config):
    """markov_rank: channels between the token before and the logits, 0 without; markov_kind: of KINDS."""

    markov_rank: int = 0
    markov_kind: str = "vanilla"

    method = "dspark"


class Markov(nnx.Module):
    """What the token before adds to the logits."""

    def __init__(self, config: Config, dtype: Any) -> None:
        c, rank, matrix = config, config.markov_rank, declare("matrix", dtype)
        self.config, (_, read, given) = c, KINDS[c.markov_kind]
        self.before = declare("table", dtype)(c.vocab_size, rank, axes=("vocab", None))
        self.after = matrix(rank, c.head_size, axes=(None, "vocab"), head=True)
        if given:
            self.inner = matrix(read * rank + c.width, given * rank)
            self.inner_bias = declare("bias", dtype)(given * rank)

    def __call__(self, state, token, hidden, backend):
        """state [B,r], token i32[B], hidden [B,E] of the place -> (f32[B,V], the next state)."""
        c = self.config
        x = jnp.take(self.before[...], token, axis=0, mode="clip")
        if c.markov_kind != "vanilla":
            read = [hidden, x] if c.markov_kind == "gated" else [state, x, hidden]
            inner = product(jnp.concatenate(read, axis=-1), self.inner[...], backend) + self.inner_bias[...]
            if c.markov_kind == "gated":
                x = (jax.nn.sigmoid(inner) * x).astype(x.dtype)
            else:
                gate, new, out = jnp.split(inner, 3, axis=-1)
                gate = jax.nn.sigmoid(gate)
                state = (gate * state + (1 - gate) * jnp.tanh(new)).astype(state.dtype)
                x = jnp.tanh(out).astype(x.dtype)
        return whole(product(x, self.after[...], backend), backend), state


class DSparkHead(dflash.DFlashHead):
    config: Config

    def __init__(self, config: Config, dtype: Any) -> None:
        super().__init__(config, dtype)
        if config.markov_rank:
            self.markov = Markov(config, dtype)


module.register(Config, DSparkHead)


class After(Place):
    """A place after a token, which adds to its logits."""

    def __init__(self, place: tuple[Any, ...], added: jax.Array) -> None:
        super().__init__(*place)
        self.added = added

    def logits(self, x, backend):
        return super().logits(x, backend) + self.added

    def likeliest(self, x, backend, vocab_size=None):
        found = likeliest(self.logits(x, backend)[..., :vocab_size])
        return found if self.vocabulary is None else jnp.take(self.vocabulary.d2t, found, mode="clip")


@dataclasses.dataclass(frozen=True)
class DSpark(dflash.DFlash):
    def drafts(self, head, logits, hidden, pending, choose):
        if not head.config.markov_rank:
            return super().drafts(head, logits, hidden, pending, choose)
        known: dict[Any, Any] = {}
        state = jnp.zeros((hidden.shape[0], head.config.markov_rank), hidden.dtype)
        if not head.config.from_pending:  # a place that makes no draft, but has a part in the state
            _, state = head.markov(state, pending, hidden[:, 0], self.model.backend)
            hidden = hidden[:, 1:]

        def step(state, token, i) -> Step:
            x = lax.dynamic_index_in_dim(hidden, i, axis=1, keepdims=False)
            added, state = head.markov(state, token, x, self.model.backend)
            return Step(After((logits, hidden, known, i), added), x, state)

        drafts, probs, _ = chain(hidden.shape[1], step(state, pending, 0), step, choose)
        return drafts, probs


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> DSpark:
    return DSpark(k, most, models["draft"], models["target"])


def read(found: Found) -> Reading:
    stored = found.shapes.get("markov_head.markov_w1.weight", (0, 0))[-1]
    rank, kind = found.whole("markov_rank", stored, "rare_width"), found.raw.get("markov_head_type") or "vanilla"
    if kind not in KINDS:
        raise UnsupportedError(f"{found.name}: markov_head_type={kind!r} is not supported: {', '.join(KINDS)} are")
    inner = KINDS[kind][0]
    names = {"markov_w1.weight": "before", "markov_w2.weight": "after"}
    names |= {f"{inner}.weight": "inner", f"{inner}.bias": "inner_bias"} if inner else {}
    reading = dflash.read(found, Config, from_pending=True, markov_rank=rank, markov_kind=kind)
    places = {f"markov_head.{name}": (f"markov.{place}", "") for name, place in names.items()}
    ignored = (*reading.ignored, "confidence_head.*")
    return dataclasses.replace(reading, names={**reading.names, **places}, ignored=ignored)
