"""Gemma 4's assistants: draft models whose layers compute only queries, over the keys and values in the target's cache.

An assistant has no cache of its own. Each step of a round proposes one token, and all steps use the position of the
pending token, which the target has not read yet. A step reads the embedding of the token before its own and a hidden
state. The first step's hidden state is that of the target's last layer, a later step's that of the step before. Some
assistants divide the vocabulary into clusters, and compute logits only for the tokens of the best clusters.

Source: the model gemma4_assistant of transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.cache import features
from jaxspec.cache.layer import LayerCache
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.errors import MisfitError, UnsupportedError, UserError
from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters.base import Choose, Drafter, History, ModelParams, Proposal, Rank, target_parameters
from jaxspec.drafters.chain import Step, chain
from jaxspec.drafters.head_checkpoint import HEAD, TABLE, HeadCheckpoint
from jaxspec.drafters.trees.growth import Grown, Nodes, Shape, grow_tree
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import Layer, bind, module, through
from jaxspec.models.draft_spec import DraftSpec, HeadConfig
from jaxspec.models.families import FAMILIES, Place, layer_names
from jaxspec.models.head import Head, product
from jaxspec.models.layer_config import LayerConfig
from jaxspec.models.limits import short
from jaxspec.models.paged import PagedModel
from jaxspec.models.parameters import declare
from jaxspec.models.reading import Reading
from jaxspec.models.rows import Rows
from jaxspec.models.table import looked_up
from jaxspec.sampling.rng import take_row
from pallas_kernels import plain


@dataclasses.dataclass(frozen=True)
class Config(HeadConfig):
    """The architecture of an assistant.

    target_width: width of the target's hidden states.
    reads: index, among the target's layers with a cache, of the one that each layer reads.
    num_centroids: number of clusters of tokens; 0 for an output head over all tokens.
    top_centroids: number of clusters whose tokens get logits.
    """

    target_width: int = 0
    reads: tuple[int, ...] = ()
    num_centroids: int = 0
    top_centroids: int = 0

    cached_layers = ()

    @property
    def spec(self) -> DraftSpec:
        return DraftSpec("gemma4_assistant", self.target_width)


class Assistant(Head):
    """The network of an assistant."""

    config: Config

    def __init__(self, config: Config, dtype: Any) -> None:
        c = self.config = config
        matrix = declare("matrix", dtype)
        self.embed = declare("table", dtype)(c.vocab_size, c.width, axes=("vocab", None), head=True)
        self.pre = matrix(2 * c.target_width, c.width)
        self.layers = nnx.List([Layer(c, i, dtype) for i in range(c.num_layers)])
        self.norm = declare("norm")(c.width)
        self.post = matrix(c.width, c.target_width)
        if c.num_centroids:
            self.centroids = matrix(c.width, c.num_centroids, head=True)
            self.token_ordering = declare("ids")(c.vocab_size)

    def __call__(
        self, x: Float[Array, "n 1 _"], caches: list[Any], rows: Rows, backend: Backend
    ) -> tuple[Float[Array, "n 1 E"], Float[Array, "n 1 M"]]:
        """Run the layers on x, an embedding followed by a hidden state. Return (hidden, the next step's hidden state).

        caches: for each layer, the target's cache that it reads, and the target's backend.
        """
        x = product(x, self.pre[...], backend).astype(x.dtype)
        _, hidden, _, _ = through(list(self.layers), x, caches, rows, backend, norm=self.norm[...])
        return hidden, product(hidden, self.post[...], backend).astype(x.dtype)

    def logits(self, x: jax.Array, backend: Backend) -> jax.Array:
        """Return the logits f32[..., V] of hidden states x [..., E]; -inf for tokens outside the best clusters."""
        c = self.config
        if not c.num_centroids:
            return super().logits(x, backend)
        ids, near = self.of_best(x, backend)
        every = jnp.full((len(ids), c.vocab_size), -jnp.inf, jnp.float32)
        return every.at[jnp.arange(len(ids))[:, None], ids].set(near).reshape(*x.shape[:-1], -1)

    def argmax_token(self, x: jax.Array, backend: Backend, vocab_size: int | None = None) -> jax.Array:
        """Return the argmax token i32[...]. The few logits are compared where they are: a TPU scatters slowly."""
        c = self.config
        if not c.num_centroids:
            return super().argmax_token(x, backend, vocab_size)
        ids, near = self.of_best(x, backend)
        count = vocab_size or c.vocab_size
        ids, near = jnp.where(ids < count, ids, 0), jnp.where(ids < count, near, -jnp.inf)
        largest = near == near.max(axis=-1, keepdims=True)
        return jnp.where(largest, ids, count - 1).min(axis=-1).reshape(x.shape[:-1])

    def of_best(self, x: jax.Array, backend: Backend) -> tuple[jax.Array, jax.Array]:
        """Return the ids i32[n, m] of the m tokens of the best clusters, and their logits f32[n, m]."""
        c = self.config
        rows = x.reshape(-1, x.shape[-1])
        _, best = lax.top_k(product(rows, self.centroids[...], backend), c.top_centroids)
        ids = self.token_ordering[...].reshape(c.num_centroids, -1)[best].reshape(len(rows), -1)
        table = looked_up(self.embed[...], ids, backend).astype(x.dtype)
        precision = plain.matmul_precision(x.dtype)
        near = jnp.einsum("re,rne->rn", rows, table, precision=precision, preferred_element_type=jnp.float32)
        return ids, near


module.register(Config, Assistant)


@dataclasses.dataclass(frozen=True)
class AssistantDrafter(Drafter):
    """A drafter that uses an assistant.

    model: the assistant.
    target: the model that it drafts for.
    """

    model: PagedModel
    target: PagedModel

    @property
    def features_width(self) -> int:
        config: Any = self.model.config
        width: int = config.target_width
        return width

    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        run, first = self.start(params, cache, history)

        def step(state: Any, token: Int[Array, " B"], i: Any) -> Step:
            head, hidden, state = run(state, token[:, None])
            return Step(head, hidden[:, 0], state)

        drafts, probs, _ = chain(self.num_speculative_tokens, first, step, choose)
        return Proposal(drafts, probs, self.wanted(history)), cache.draft

    def grow(
        self, params: ModelParams, cache: PagedKVCache, history: History, shape: Shape, rank: Rank
    ) -> tuple[Proposal, Grown, tuple[LayerCache, ...]]:
        run, first = self.start(params, cache, history)

        def step(state: Any, nodes: Nodes, level: Any) -> Step:
            return run(jnp.take_along_axis(state, nodes.after[:, :, None], axis=1), nodes.tokens)

        root = first._replace(state=jnp.repeat(first.state, shape.width, axis=1))
        grown, _ = grow_tree(shape, root, step, rank)
        return Proposal(grown.tokens, None, self.wanted(history)), grown, cache.draft

    def start(self, params: ModelParams, cache: PagedKVCache, history: History) -> tuple[Callable[..., Step], Step]:
        """Return the function run(state [B,w,M], tokens i32[B,w]), and the output of the step from the pending token.

        The function runs the assistant for the drafts after w tokens of each row. They all see the same keys: those of
        the committed tokens before the pending one. The position of the pending token is theirs, too.
        """
        config: Any = self.model.config
        backend, count = self.model.backend, history.num_tokens
        caches = [(cache.target[i], self.target.backend) for i in config.reads]
        last = jnp.maximum(count - 2, 0)  # position of the token before the pending one
        seen = jnp.where(history.live, count - 1, 0)  # as if the query stood there: it sees no key after it

        def run(state: Any, tokens: Any) -> Step:
            # Nodes of a tree are rows of their own, because they see nothing of each other.
            own = Rows((last + 1)[:, None], None, history.block_table, seen, window_table=history.window_table)
            rows = jax.tree.map(lambda x: jnp.repeat(x, tokens.shape[1], axis=0), own)
            target = bind(self.target.config, target_parameters(params))
            head: Any = bind(config, params["draft"])
            x = target.embedded(tokens.reshape(-1, 1), backend)
            x = jnp.concatenate([x, state.reshape(-1, 1, state.shape[-1]).astype(x.dtype)], axis=-1)
            found = head(x, caches, rows, backend)
            return Step(head, *(y.reshape(*tokens.shape, -1) for y in found))

        known = features.read(cache, last[:, None], history.block_table, backend.placement)
        pending = take_row(history.tokens, count - 1)
        head, hidden, state = run(known, pending[:, None])
        return run, Step(head, hidden[:, 0], state)

    def wanted(self, history: History) -> Any:
        """Return each row's number of drafts: 0 after a prompt of one token, which the target has not read yet."""
        return jnp.where(history.live & (history.num_tokens > 1), history.num_wanted, 0)


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> AssistantDrafter:
    """Return the drafter that uses an assistant. The arguments are those in `jaxspec.drafters.methods`.

    Raises: UserError if the target's degree of tensor parallelism does not divide the assistant's query heads.
    """
    degree = models["target"].backend.degree
    for layer in models["draft"].config.layers:
        if layer.num_heads % degree:
            raise UserError(f"tensor_parallel_size={degree} does not divide the assistant's {layer.num_heads} heads")
    return AssistantDrafter(k, models["draft"], models["target"])


def read(found: HeadCheckpoint) -> Reading:
    """Return the `Reading` of an assistant's checkpoint: its configuration and the names of its tensors.

    Raises:
      UnsupportedError: the checkpoint is of another kind of assistant.
      UserError: a size in config.json is missing or impossible.
      MisfitError: the assistant was made for another target.
    """
    text = found.raw.get("text_config")
    if found.raw.get("model_type") != "gemma4_assistant" or not isinstance(text, Mapping):
        kind = short(found.raw.get("model_type"))
        raise UnsupportedError(f"{found.name}: an assistant of model_type={kind}: gemma4_assistant is supported")
    # All layers share the target's keys and values. They are parsed as if they had keys and values of their own.
    parsed = found.parse({"rope_parameters": None, **text, "num_kv_shared_layers": 0})
    found.fits("width", found.whole("backbone_hidden_size", kind="width"), found.target.width)
    found.fits("vocabulary", parsed.vocab_size, found.target.vocab_size)
    ordered = found.flag("use_ordered_embeddings", default=False)
    clusters = found.whole("num_centroids") if ordered else 0
    best = found.whole("centroid_intermediate_top_k") if ordered else 0
    if ordered and (parsed.vocab_size % clusters or best > clusters):
        raise UserError(f"{found.name}: {best} of {clusters} clusters for {parsed.vocab_size} tokens: fetch it again")
    config = Config(**vars(parsed) | {
        "max_model_len": found.target.max_model_len,
        "bos_id": found.target.bos_id,
        "eos_ids": found.target.eos_ids,
        "tied": True,
        "logit_soft_cap": None,  # transformers caps no logits of an assistant
        "per_layer": tuple(map(queries_only, parsed.layers)),
        "target_width": found.target.width,
        "reads": tuple(read_layer(found, layer) for layer in parsed.layers),
        "num_centroids": clusters,
        "top_centroids": best,
    })  # fmt: skip
    family = {name.removeprefix("model."): place for name, place in FAMILIES["gemma4"].names.items()}
    own: dict[str, Place] = {
        **layer_names("layers.{}."),
        **family,
        "layers.{}.self_attn.q_proj.weight": ("layers.{}.q", ""),
        "norm.weight": ("norm", ""),
        TABLE: ("embed", ""),
        "pre_projection.weight": ("pre", ""),
        "post_projection.weight": ("post", ""),
        "masked_embedding.centroids.weight": ("centroids", ""),
        "masked_embedding.token_ordering": ("token_ordering", ""),
    }
    return Reading(config, found.named(own), repeats={HEAD: found.prefix + TABLE})


def queries_only(layer: LayerConfig) -> LayerConfig:
    """Return a layer of an assistant, for a layer with keys and values of its own.

    Its window is wider by one: transformers counts it from the token before the pending one, and includes both ends.
    """
    window = None if layer.window is None else layer.window + 1
    return dataclasses.replace(layer, mixer="queries", num_kv_heads=layer.num_heads, window=window, value_is_key=False)


def read_layer(found: HeadCheckpoint, layer: LayerConfig) -> int:
    """Return the index, among the target's layers with a cache, of the layer whose keys and values a layer reads.

    It is the target's last one of the same kind: with a window, or without.
    """
    alike = [i for i, own in enumerate(found.target.cached_layers) if (own.window is None) == (layer.window is None)]
    own = found.target.cached_layers[alike[-1]] if alike else None
    wanted = (layer.num_kv_heads, layer.head_dim)
    if own is None or (own.num_kv_heads, own.head_dim) != wanted:
        has = f"{own.num_kv_heads} heads of {own.head_dim}" if own else "none"
        raise MisfitError(
            f"the draft {found.name!r} reads {wanted[0]} key-value heads of {wanted[1]}, the target "
            f"{found.target_name!r} has {has}: give it the target that it was trained for"
        )
    if (layer.window or 0) > (own.window or 0):
        raise MisfitError(
            f"the draft {found.name!r} has a window of {layer.window} tokens, the target {found.target_name!r} keeps "
            f"{own.window}: give it the target that it was trained for"
        )
    return alike[-1]
