"""The pieces of a decoder: where and how it runs, rotary tables, attention over pages. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxspec.errors import UnsupportedError, UserError
from jaxspec.models.config import Rope
from jaxspec.parallel.placement import Placement, per_shard
from pallas_kernels.device import Device
from pallas_kernels.feed_forward import feed_forward
from pallas_kernels.plain import project, rms_norm
from pallas_kernels.self_attention import self_attention
from pallas_kernels.weights import product
from pallas_kernels.weights import specs as partition


@dataclasses.dataclass(frozen=True)
class Backend:
    """Static facts about where a program runs: what it is compiled for, where the model lies, choice of kernels."""

    device: Device
    placement: Placement | None = None
    kernels: str | None = None  # as EngineConfig has it
    dense_attention: Literal["xla", "cudnn"] = "xla"  # of passes without a cache

    def __post_init__(self) -> None:
        if self.kernels == "pallas" and self.device.platform == "gpu" and not self.device.has_triton:
            raise UserError(f"kernels='pallas': {self.device.no_kernels()}; leave kernels out, plain forms run there")

    @property
    def alone(self) -> bool:
        return self.placement is None or self.placement.alone

    @property
    def streams(self) -> bool:
        """Whether products stream matrices that lie output-first (see `jaxspec.models.storage`)."""
        return self.device.platform == "cpu" and self.kernels is None and self.alone

    @property
    def degree(self) -> int:
        """Into how many parts the model is cut."""
        return 1 if self.placement is None else self.placement.degree

    def in_parts(self, vocab_size: int) -> Placement | None:
        """Where a vocabulary of this size lies in parts; None where each device has it whole."""
        cut = self.placement is not None and self.degree > 1 and self.placement.divides(vocab_size)
        return self.placement if cut else None

    @property
    def sum_over(self) -> tuple[str, ...]:
        """As `Placement.sum_over`."""
        return () if self.placement is None else self.placement.sum_over

    def how(self) -> dict[str, Any]:
        """The keyword arguments that every op takes."""
        plain = not self.alone and self.device.platform == "cpu"  # there, matrices do not lie output-first
        return {"platform": self.device, "implementation": "reference" if plain else self.kernels}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    """Where the tokens of one pass stand.

    positions i32[B,T]: where the tokens stand in their texts.
    slots i32[B*T]: the pad slot where nothing is written.
    block_table i32[B,N]: page ids.
    kv_len i32[B]: position of the row's first token + T, so that attention places query t at kv_len - T + t.
    num_keys i32[B]: positions of the row that are written, padding of this pass left out. A row with kv_len 0 is not
      computed. A pass without a cache has positions only.
    tree i32[B,T,_]: of tokens that are nodes of a tree, which of them each sees (see `paged_attention`); else None.
    """

    positions: jax.Array
    slots: Any = None
    block_table: Any = None
    kv_len: Any = None
    num_keys: Any = None
    tree: Any = None


def rotary_tables(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos, sin [B,T,D/2] in float32."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if rope.factors:
        frequencies = frequencies / np.asarray(rope.factors)
    angles = positions[:, :, None].astype(jnp.float32) * frequencies.astype(np.float32)
    return jnp.cos(angles), jnp.sin(angles)


def attend(
    x: jax.Array,
    weights: dict[str, jax.Array],
    axes: Mapping[str, tuple[str | None, ...]],
    pages: jax.Array,
    rows: Rows,
    tables: tuple[jax.Array, jax.Array],
    backend: Backend,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """The first half of a layer on every device's heads: `self_attention` of x [B,T,E] -> ([B,T,H*D], pages).

    weights: norm and qkv, and where the family has them bias, q_norm, k_norm; normed where x is normed already;
    next_out, the matrix of the next product. axes: the parameters' logical ones.
    """

    def shard(x, weights, pages, where, tables):
        cos, sin = tables
        return self_attention(x, **weights, pages=pages, **where, cos=cos, sin=sin, **options, **backend.how())

    where = {name: getattr(rows, name) for name in ("slots", "block_table", "kv_len", "num_keys", "tree")}
    if (lies := backend.placement) is None:
        return shard(x, weights, pages, where, tables)
    specs = {name: partition(x, lies.cut(axes.get(name, ()))) for name, x in weights.items()}
    run = per_shard(shard, lies, (P(), specs, lies.of_pages, P(), P()), (lies.of_heads, lies.of_pages))
    return run(x, weights, pages, where, tables)


def second_half(
    x: jax.Array,
    mixed: jax.Array,
    weights: dict[str, jax.Array],
    axes: Mapping[str, tuple[str | None, ...]],
    backend: Backend,
    **options: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """The second half of a layer, on every device's heads and columns: `feed_forward` of x [B,T,E] and mixed [B,T,H*D].
    weights: its arrays by name. axes: the parameters' logical ones."""

    def shard(x, mixed, weights):
        return feed_forward(x, mixed, **weights, **options, sum_over=backend.sum_over, **backend.how())

    if (lies := backend.placement) is None:
        return shard(x, mixed, weights)
    specs = {name: partition(x, lies.cut(axes.get(name, ()))) for name, x in weights.items()}
    return per_shard(shard, lies, (P(), lies.of_heads, specs), P())(x, mixed, weights)


def attend_densely(
    x: jax.Array,
    weights: dict[str, jax.Array],
    tables: tuple[jax.Array, jax.Array],
    backend: Backend,
    *,
    num_kv_heads: int,
    eps: float,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """The same without a cache: x [B,T,E] holds all that each row sees -> [B,T,H*D]. It can be differentiated.

    Raises: UnsupportedError for a soft cap.
    """
    if soft_cap is not None:
        raise UnsupportedError(f"attention scores with a soft cap ({soft_cap}): passes without a cache have none")
    normed = rms_norm(weights["norm"], x, eps)
    bias, q_norm, k_norm = (weights.get(name) for name in ("bias", "q_norm", "k_norm"))
    query, key, value = project(product(normed, weights["qkv"]), bias, q_norm, k_norm, *tables, num_kv_heads, eps)
    seen = None if window is None else (window - 1, 0)
    options: dict[str, Any] = {"scale": scale, "is_causal": True, "local_window_size": seen}
    mixed = jax.nn.dot_product_attention(query, key, value, implementation=backend.dense_attention, **options)
    return mixed.reshape(*x.shape[:2], -1)
