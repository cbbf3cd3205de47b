"""The gated MLP: act(gate(x)) * up(x), projected down."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.layer_config import LayerConfig
from jaxspec.models.parameters import declare as declared
from jaxspec.parallel.mailbox import mailbox_of
from jaxspec.parallel.placement import per_shard
from pallas_kernels import feed_forward as op
from pallas_kernels.weights import specs as partition

NEXT_AXES = (None, "heads")  # logical axes of next_qkv, the next layer's merged matrix of queries, keys and values


def declare(layer: Any, config: ModelConfig, own: LayerConfig, dtype: Any) -> None:
    """Add the parameters of the MLP to a Layer. own: configuration of the layer."""
    width = config.width
    matrix = declared("matrix", dtype)
    norm = declared("norm")
    if config.sandwich_norm:
        layer.post_attention_norm = norm(width)
        layer.post_mlp_norm = norm(width)
    layer.mlp_norm = norm(width) if config.pre_norm else None
    layer.gate_up = matrix(width, 2 * own.mlp_width, axes=(None, "mlp"), parts=own.gate_up_parts)
    layer.down = matrix(own.mlp_width, width, axes=("mlp", None))


def feed_forward(
    layer: Any, x: jax.Array, mixed: jax.Array, backend: Backend, **following: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Compute a layer's second half: return (x [B,T,E], x normed by next_norm or None) for x and mixed [B,T,H*D].

    mixed: output of the layer's mixer, before its output projection.
    following: next_norm and next_qkv, the next layer's input norm and merged matrix qkv; after the last layer, the
      model's norm as next_norm.
    """
    c = layer.config
    used = {"out": layer.out, "gate_up": layer.gate_up, "down": layer.down}
    if c.pre_norm:
        used["norm"] = layer.mlp_norm
    if c.sandwich_norm:
        used |= {"post_attention_norm": layer.post_attention_norm, "post_mlp_norm": layer.post_mlp_norm}
    weights = {name: parameter[...] for name, parameter in used.items()} | following
    axes = {name: parameter.declared.axes for name, parameter in used.items()} | {"next_qkv": NEXT_AXES}
    if (mailbox := mailbox_of(layer)) is not None:  # the shards of its arrays are the two GPUs' own
        weights["mailbox"], axes["mailbox"] = mailbox, ("heads",)
    options: dict[str, Any] = {"eps": c.norm_eps, "activation": c.activation, "block": layer.own.mlp_block}
    options["post_eps"] = c.post_norm_eps

    def shard(x: jax.Array, mixed: jax.Array, weights: dict[str, Any]) -> tuple[jax.Array, jax.Array | None]:
        return op(x, mixed, **weights, **options, sum_over=backend.sum_over, **backend.how())

    placement = backend.placement
    if placement is not None:
        specs = {name: partition(w, placement.spec(axes.get(name, ()))) for name, w in weights.items()}
        shard = per_shard(shard, placement, (P(), placement.of_heads, specs), P())
    return shard(x, mixed, weights)
