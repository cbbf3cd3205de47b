"""DFlash: a drafting head of a few layers that drafts a whole block of tokens in one pass.

The block is the pending token (accepted, not yet read by the target) and mask tokens. The block's tokens attend to each
other and to all earlier positions. In every layer the keys and values of the earlier positions are computed from the
target's hidden states at these positions.
Source: Chen et al., https://arxiv.org/abs/2602.06036. Checkpoint formats: z-lab's, the speculators library's,
and that of Muse Glimmer's assistant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.cache import features
from jaxspec.cache.layer import LayerCache
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.errors import UnsupportedError
from jaxspec.common.shapes import Array, Float
from jaxspec.drafters import muse_glimmer
from jaxspec.drafters.base import Choose, Chunk, Drafter, History, ModelParams, Proposal, target_parameters
from jaxspec.drafters.chain import at_once
from jaxspec.drafters.head_checkpoint import HEAD, RARE, TABLE, VERIFIER, HeadCheckpoint
from jaxspec.drafters.own import OwnParts
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Layer, bind, module
from jaxspec.models.draft_spec import DraftSpec, HeadConfig, draft_spec
from jaxspec.models.families import layer_names
from jaxspec.models.head import product
from jaxspec.models.mixers.attention import rotary_tables
from jaxspec.models.paged import PagedModel, places
from jaxspec.models.parameters import declare
from jaxspec.models.reading import Reading
from jaxspec.models.rows import Rows
from jaxspec.sampling.rng import take_row
from pallas_kernels.plain import rms_norm
from pallas_kernels.tree_mask import packed


@dataclasses.dataclass(frozen=True)
class Config(HeadConfig):
    """The architecture of a DFlash head.

    taps: layers of the target whose inputs the head reads.
    target_width: width of the target's layers.
    block_size: longest block that the head was trained for, in tokens, with the pending token (the block's first).
    from_pending: whether the output at the pending token also makes a draft.
    has_table: whether the drafting head has its own embedding table; else the target's is used.
    has_head: whether the drafting head has its own output head, over some or all of the target's ids; else the
      target's is used.
    bare_target: whether the target's embeddings are used without their norm, and its logits without factor and bound.
    """

    taps: tuple[int, ...] = ()
    target_width: int = 0
    block_size: int = 1
    from_pending: bool = False
    has_table: bool = False
    has_head: bool = False
    bare_target: bool = False

    @property
    def spec(self) -> DraftSpec:
        most = self.block_size - (not self.from_pending)
        return DraftSpec("dflash", self.width, self.taps, ("fc",), uses_target_head=not self.has_head, max_drafts=most)


class DFlashHead(OwnParts):
    """The network of a DFlash head."""

    config: Config

    def __init__(self, config: Config, dtype: Any) -> None:
        super().__init__(config, dtype)
        c, norm = config, declare("norm")
        self.fc = declare("matrix", dtype)(len(c.taps) * c.target_width, c.width, axes=(None, "features"))
        self.hidden_norm, self.norm = norm(c.width), norm(c.width)
        self.layers = nnx.List([Layer(c, i, dtype) for i in range(c.num_layers)])

    def features(
        self, hidden: Float[Array, "B T E"] | None, tapped: Sequence[Float[Array, "B T E"]], backend: Backend
    ) -> Float[Array, "B T M"]:
        x = product(jnp.concatenate(tapped, axis=-1), self.fc[...], backend).astype(tapped[0].dtype)
        return rms_norm(self.hidden_norm[...], x, self.config.norm_eps)

    def __call__(
        self,
        x: Float[Array, "B T E"],
        past: Float[Array, "B _ E"],
        pages: tuple[Any, ...],
        rows: Rows,
        backend: Backend,
    ) -> tuple[Float[Array, "B T E"], tuple[Any, ...]]:
        """Run the layers over a block of tokens. Return the block's hidden states [B,T,E] and the cache pages.

        x [B,T,E]: embeddings of the block's tokens; T is 0 if only the cache is to be filled.
        past [B,W,E]: features (projected hidden states of the target) of earlier positions that the pages lack.
        pages: pages of the head's KV cache, for each layer.
        rows: positions of `past` and then of `x`, and the tree mask with which the block's tokens see each other.
        """
        c, count = self.config, x.shape[1]
        written = []
        ropes = rotary_tables(c.layers, rows, backend)
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            norm = layer.input_norm[...]
            if not count:
                # All layers read the same input here. Without the barrier XLA on a GPU would
                # concatenate their matrices, which takes memory for a copy of all of them.
                past, norm = lax.optimization_barrier((past, norm))
            both = jnp.concatenate([past, rms_norm(norm, x, c.norm_eps)], axis=1)
            mixed, layer_pages = layer.mix(both, both, layer_pages, None, rows, ropes, backend, num_queries=count)
            written.append(layer_pages)
            if count:
                x, _ = layer.feed_forward(x, mixed, backend)
        return rms_norm(self.norm[...], x, c.norm_eps), tuple(written)


module.register(Config, DFlashHead)


class Block(NamedTuple):
    """The output of DFlash's pass over a block of tokens.

    head: the drafting head, bound to its parameters.
    target: the model that the head drafts for, bound to its parameters, some of which the head shares.
    hidden [B,_,E]: hidden states of the block's tokens up to the one that makes the K-th draft; the last K make drafts.
    pending i32[B]: the pending token (accepted, not yet read by the target), which is the block's first token.
    wanted, draft_len: the fields `num_proposed` and `draft_len` of the proposal.
    pages: pages of the head's KV cache after the pass.
    """

    head: Any
    target: Any
    hidden: jax.Array
    pending: jax.Array
    wanted: jax.Array
    draft_len: jax.Array
    pages: tuple[LayerCache, ...]

    @property
    def logits(self) -> Any:
        """The model that computes logits from the hidden states."""
        return self.head if self.head.config.has_head else self.target


@dataclasses.dataclass(frozen=True)
class DFlash(Drafter):
    """A drafter that drafts all tokens of a block in one pass.

    most: the engine's largest K. When the head drafts, its KV cache may lack up to most + 1 positions before the
      pending token's.
    model: the drafting head.
    target: the model that the head drafts for.
    """

    most: int
    model: PagedModel
    target: PagedModel

    @property
    def max_lag(self) -> int:
        return self.most + 1

    @property
    def taps(self) -> tuple[int, ...]:
        return draft_spec(self.model.config).taps

    @property
    def features_width(self) -> int:
        return draft_spec(self.model.config).features_width

    def features(
        self, params: ModelParams, hidden: Float[Array, "B T E"], tapped: Sequence[Float[Array, "B T E"]]
    ) -> Float[Array, "B T M"]:
        result: Float[Array, "B T M"] = bind(self.model.config, params["draft"]).features(
            hidden, tapped, self.model.backend
        )
        return result

    @property
    def target_config(self) -> ModelConfig:
        """The target's configuration, as far as the head uses the target's embeddings and output head."""
        config: Any = self.model.config
        if not config.bare_target:
            return self.target.config
        return dataclasses.replace(self.target.config, embed_norm=False, logit_scale=1.0, logit_soft_cap=None)

    @property
    def independent(self) -> bool:
        return True

    @property
    def passes(self) -> int:
        return 1

    @property
    def reach(self) -> int:
        config: Any = self.model.config
        result: int = max(self.num_speculative_tokens, config.block_size - 1)
        return result

    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        block = self.block(params, cache, history)
        drafts, probs = at_once(block.logits, block.hidden[:, -self.num_speculative_tokens :], choose)
        return Proposal(drafts, probs, block.wanted, block.draft_len), block.pages

    def block(self, params: ModelParams, cache: PagedKVCache, history: History) -> Block:
        """Run the pass over a whole block of tokens, even if fewer drafts are requested.

        The block's tokens attend to each other, so the block is as long as in training. Only the end of the context
        shortens it. For a row that wants no drafts the pass only fills the cache.
        """
        count, backend = self.num_speculative_tokens, self.model.backend
        config: Any = self.model.config
        head: Any = bind(config, params["draft"])
        target = bind(self.target_config, target_parameters(params))
        last = history.num_tokens - 1  # the pending token's position
        start = jnp.clip(history.draft_len, jnp.maximum(last - self.most - 1, 0), last)
        in_step = history.draft_len >= last - self.max_lag
        wanted = jnp.where(history.live & in_step, history.num_wanted, 0)

        past_at = start[:, None] + jnp.arange(self.most + 1, dtype=jnp.int32)
        size = head.config.block_size
        num_skipped = 0 if head.config.from_pending else 1  # number of the block's first tokens that make no draft
        filled = jnp.where(wanted > 0, jnp.clip(self.model.max_model_len - last, 0, size), 0)
        block = jnp.arange(size, dtype=jnp.int32)[None, :]
        positions = jnp.concatenate([past_at, last[:, None] + block], axis=1)
        unread = past_at >= last[:, None]
        masked = jnp.concatenate([unread, block >= filled[:, None]], axis=1) | ~history.live[:, None]
        past = jnp.where(unread[:, :, None], 0, features.read(cache, past_at, history.block_table, backend.placement))
        pending = take_row(history.tokens, last)
        tokens = jnp.where(block == 0, pending[:, None], head.config.mask_id)
        x = (head if head.has_table else target).embedded(tokens, backend)
        rows = self.model.rows(positions, masked, history.block_table)
        end = jnp.where(history.live, last + filled, 0)
        all_see_all = jnp.ones((*last.shape, size, size), bool)
        tree = packed(last[:, None] + block, last, all_see_all)
        rows = dataclasses.replace(rows, kv_len=end, num_keys=end, tree=tree)
        hidden, pages = head(x, past.astype(x.dtype), cache.draft, rows, backend)
        draft_len = jnp.where(in_step, last, history.draft_len)
        return Block(head, target, hidden[:, : num_skipped + count], pending, wanted, draft_len, pages)

    def prefill(self, params: ModelParams, cache: PagedKVCache, chunk: Chunk) -> tuple[LayerCache, ...]:
        head: Any = bind(self.model.config, params["draft"])
        positions, masked = places(chunk.tokens, chunk.start, chunk.length)
        past = features.read(cache, positions, chunk.block_table, self.model.backend.placement)
        past = jnp.where(masked[:, :, None], 0, past)
        rows = self.model.rows(positions, masked, chunk.block_table)
        result: tuple[LayerCache, ...] = head(past[:, :0], past, cache.draft, rows, self.model.backend)[1]
        return result


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> DFlash:
    """Return the DFlash drafter. The arguments are those in `jaxspec.drafters.methods`."""
    return DFlash(k, most, models["draft"], models["target"])


FEATURES = {"fc.weight": ("fc", ""), "hidden_norm.weight": ("hidden_norm", "")}
NAMES = {
    **layer_names("layers.{}."),
    **FEATURES,
    "norm.weight": ("norm", ""),
    HEAD: ("head", ""),
    **RARE,
    "d2t": ("d2t", ""),
}


def read(found: HeadCheckpoint, kind: type[Config] = Config, *, from_pending: bool = False, **own: Any) -> Reading:
    """Return the `Reading` of a checkpoint of DFlash or a derived method: configuration and tensor names.

    kind: class of the configuration.
    from_pending: value of the configuration's field if the checkpoint does not set it.
    own: values of the fields that only the derived method's configuration has.
    """
    assistant = found.raw.get("model_type") == muse_glimmer.MODEL_TYPE
    if assistant:
        own |= {"windows": muse_glimmer.windows(found), "bare_target": True}
        found = muse_glimmer.plain(found)
    features = muse_glimmer.FEATURES if assistant else FEATURES
    target = found.target
    count = found.whole("num_target_layers", target.num_layers, "num_layers")
    found.fits("layers", count, target.num_layers)
    fields, taps = found.layers(), found.taps()
    rows = found.shapes.get(next(iter(features)), (0, 0))[-1]
    found.fits(f"width (of {len(taps)} layers that it reads)", rows // len(taps), target.width)
    found.fits("width", fields["width"], target.width)  # equal, as the head may use the target's table
    config = kind(**fields | own | {
        "taps": taps,
        "target_width": target.width,
        "mask_id": found.whole("mask_token_id", kind="token_id"),
        "block_size": found.whole("block_size", kind="num_heads"),
        "from_pending": found.flag("sample_from_anchor", default=from_pending),
        "has_head": found.has("d2t") or found.own(HEAD),
        "reduced_vocab_size": found.shapes["d2t"][0] if found.has("d2t") else None,
    } | found.own_table())  # fmt: skip
    if any(config.windows) and not assistant:
        raise UnsupportedError(
            f"{found.name}: layers with a sliding window are not supported in a draft that fills blocks"
        )
    copies = found.copies(TABLE, *(() if found.has("d2t") else (HEAD,)), *VERIFIER)
    names = {name: place for name, place in NAMES.items() if name not in FEATURES} | features
    names |= {TABLE: ("embed", "")} if config.has_table else {}
    return Reading(config, names, ("t2d",), copies=copies)
