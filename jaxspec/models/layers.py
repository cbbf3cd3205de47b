"""The pieces of a decoder: linear, RMSNorm, rotary embedding, attention over pages, MLP. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxspec.models.config import Rope
from jaxspec.parallel.mesh import MODEL_AXES, PAGES_SPEC, per_shard
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention


@dataclasses.dataclass(frozen=True)
class Backend:
    """Static facts about where a program runs: platform ("cpu", "gpu", "tpu"), mesh, kernel choice."""

    platform: str
    mesh: Mesh | None = None
    implementation: str | None = None  # None: the measured fastest of the platform

    @property
    def how(self) -> dict[str, Any]:
        """The keyword arguments that every kernel takes."""
        return {"platform": self.platform, "implementation": self.implementation}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    """Where the tokens of one pass stand.

    positions i32[B,T]; slots i32[B*T] (pad slot where nothing is written); block_table i32[B,N];
    kv_len i32[B]: position of the row's first token + T, so that attention places query t at kv_len - T + t.
    A row with kv_len 0 is not computed.
    """

    positions: jax.Array
    slots: jax.Array
    block_table: jax.Array
    kv_len: jax.Array


def matmul_precision(dtype: Any) -> lax.Precision:
    """float32 means float32 everywhere, also where the hardware would rather take fewer bits."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def linear(weights: jax.Array, x: jax.Array) -> jax.Array:
    """x [..., I] times weights [I, O...] -> [..., O...].

    Weights are stored input-first: on CPU that form streams them fastest once several rows share a pass, which is
    what makes verifying K+1 tokens cheap (see README, "Speed on CPU").
    """
    return lax.dot_general(
        x,
        weights,
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=matmul_precision(x.dtype),
        preferred_element_type=x.dtype,
    )


def rms_norm(scale: jax.Array, x: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis, in float32."""
    h = x.astype(jnp.float32)
    h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h * scale.astype(jnp.float32)).astype(x.dtype)


def rotary_tables(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos, sin [B,T,1,D/2] in float32."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if rope.factors:
        frequencies = frequencies / np.asarray(rope.factors)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies.astype(np.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding of x [B,T,heads,D]: halves are rotated against each other."""
    cos, sin = tables
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def write_and_attend(
    query: jax.Array,
    kv: jax.Array,
    pages: jax.Array,
    rows: Rows,
    backend: Backend,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Writes kv [B,T,2G,D] into pages, then attends query [B,T,H,D] over them. Returns ([B,T,H,D], pages)."""
    b, t, _, d = query.shape
    if extra := pages.shape[-1] - d:  # the layout may pad the head size for its kernels
        query, kv = (jnp.pad(x, ((0, 0),) * 3 + ((0, extra),)) for x in (query, kv))
    how = backend.how

    def shard(query, kv, pages, slots, block_table, kv_len):
        pages = kv_write(pages, kv.reshape(b * t, *kv.shape[2:]), slots, **how)
        mixed = paged_attention(query, pages, block_table, kv_len, scale=scale, window=window, soft_cap=soft_cap, **how)
        return mixed, pages

    heads = P(None, None, MODEL_AXES, None)
    run = per_shard(shard, backend.mesh, (heads, heads, PAGES_SPEC, P(), P(), P()), (heads, PAGES_SPEC))
    mixed, pages = run(query, kv, pages, rows.slots, rows.block_table, rows.kv_len)
    return mixed[..., :d], pages


def activate(kind: str, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True) if kind == "gelu_tanh" else jax.nn.silu(x)
