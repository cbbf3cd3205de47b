"""LayerConfig: the configuration of one layer of a decoder."""

from __future__ import annotations

import dataclasses
import math

from jaxspec.models.rope import PLAIN_ROPE, Rope


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The configuration of one layer of a decoder.

    mlp_block: number of columns in a block of the merged matrix gate_up, in which blocks of gate's and of up's columns
      alternate; a divisor of mlp_width.
    window: sliding window in tokens; None for no window.
    rope: rotary embedding.
    query_scale: factor of the attention scores.
    kv_copies: number of copies of each key-value head of the checkpoint, so that each shard has a head; num_kv_heads
      counts all copies (`jaxspec.models.sharding`).
    shares: index of the layer whose keys and values this layer reads; None if the layer has its own.
    value_is_key: whether checkpoints hold no matrix of values, because it is the matrix of keys.
    mixer, mlp: names of the layer's halves in `jaxspec.models.mixers` and `jaxspec.models.mlps`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    mlp_block: int
    window: int | None = None
    rope: Rope = PLAIN_ROPE
    query_scale: float = 1.0
    kv_copies: int = 1
    shares: int | None = None
    value_is_key: bool = False
    mixer: str = "attention"
    mlp: str = "gated"

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def qkv_parts(self) -> dict[str, int]:
        """Number of columns of each part (q, k, v) of the merged matrix qkv in one group of columns.

        The matrix has one group for each key-value head, with the head's columns of q, k and v. Any degree of tensor
        parallelism that divides the number of groups gives each shard whole groups, with columns of every part.
        """
        return {"q": self.heads_per_group * self.head_dim, "k": self.head_dim, "v": self.head_dim}

    @property
    def gate_up_parts(self) -> dict[str, int]:
        """Number of columns of each part of the merged matrix gate_up in a group: a block of gate, then one of up."""
        return {"gate": self.mlp_block, "up": self.mlp_block}


def mlp_block(mlp_width: int, shards: int) -> int:
    """Return the largest power of two up to 128 (a TPU's lanes) for which each shard of the MLP has whole blocks.

    If `shards` does not divide mlp_width, return the largest of these powers that divides mlp_width.
    """
    for width in (128, 64, 32, 16, 8, 4, 2, 1):
        if mlp_width % (width * shards) == 0:
            return width
    return math.gcd(mlp_width, 128)
