"""LayerConfig: what one layer of a decoder is."""

from __future__ import annotations

import dataclasses
import math

from jaxspec.models.rope import PLAIN_ROPE, Rope


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One layer of a decoder.

    mixer, mlp: names in `jaxspec.models.mixers` and `jaxspec.models.mlps`.
    window: how many tokens it sees; None for all.
    mlp_block: the columns of gate, and of up, in a group of the merged product; it divides mlp_width.
    kv_copies: how often num_kv_heads counts each key-value head of a checkpoint (`jaxspec.models.sharding`).
    shares: the layer whose keys and values it reads, instead of its own; None for its own.
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
        """Part of the merged product -> its columns in each group of columns.

        Columns are grouped by key-value head, not laid side by side, so that any tensor parallelism that divides the
        number of groups gives each shard its own columns of every part.
        """
        return {"q": self.heads_per_group * self.head_dim, "k": self.head_dim, "v": self.head_dim}

    @property
    def gate_up_parts(self) -> dict[str, int]:
        """The same of the merged product of gate and up, by blocks."""
        return {"gate": self.mlp_block, "up": self.mlp_block}


def mlp_block(mlp_width: int, shards: int) -> int:
    """Return the block as wide as a TPU's lanes, 128, or as narrow as it takes to give each shard as many of them."""
    widths = [2**i for i in range(7, -1, -1) if mlp_width % (2**i * shards) == 0]
    return widths[0] if widths else math.gcd(mlp_width, 128)
