"""The gated MLP: act(gate(x)) * up(x), projected down."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.layer_config import LayerConfig
from jaxspec.models.parameters import declare as declared
from jaxspec.parallel.placement import per_shard
from pallas_kernels import feed_forward as op
from pallas_kernels.weights import specs as partition

NEXT_AXES = (None, "heads")  # of next_qkv


def declare(layer: Any, config: ModelConfig, own: LayerConfig, dtype: Any) -> None:
    c, matrix, norm = config, declared("matrix", dtype), declared("norm")
    if c.sandwich_norm:
        layer.post_attention_norm, layer.post_mlp_norm = norm(c.width), norm(c.width)
    layer.mlp_norm = norm(c.width)
    layer.gate_up = matrix(c.width, 2 * own.mlp_width, axes=(None, "mlp"), parts=own.gate_up_parts)
    layer.down = matrix(own.mlp_width, c.width, axes=("mlp", None))


def feed_forward(layer: Any, x, mixed, backend: Backend, **following: Any) -> tuple[jax.Array, jax.Array | None]:
    """Compute the second half: x [B,T,E], mixed [B,T,H*D] -> (x, the same by next_norm or None).

    following: next_norm and next_qkv, of the next layer; after the last there is the model's norm.
    """
    c = layer.config
    used = {"out": layer.out, "gate_up": layer.gate_up, "down": layer.down, "norm": layer.mlp_norm}
    if c.sandwich_norm:
        used |= {name: getattr(layer, name) for name in ("post_attention_norm", "post_mlp_norm")}
    weights = {name: parameter[...] for name, parameter in used.items()} | following
    axes = {name: parameter.declared.axes for name, parameter in used.items()} | {"next_qkv": NEXT_AXES}
    options: dict[str, Any] = {"eps": c.norm_eps, "activation": c.activation, "block": layer.own.mlp_block}

    def shard(x, mixed, weights):
        return op(x, mixed, **weights, **options, sum_over=backend.sum_over, **backend.how())

    if (placement := backend.placement) is not None:
        parts = {name: partition(w, placement.cut(axes.get(name, ()))) for name, w in weights.items()}
        shard = per_shard(shard, placement, (P(), placement.of_heads, parts), P())
    return shard(x, mixed, weights)
