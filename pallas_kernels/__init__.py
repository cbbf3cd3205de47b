"""Device kernels for speculative decoding.

Each op has an implementation in plain jnp and a Pallas kernel for GPU. Most also have a Pallas kernel for TPU.
"""

from pallas_kernels.argmax_token import argmax_token
from pallas_kernels.feed_forward import feed_forward
from pallas_kernels.kv_write import kv_write
from pallas_kernels.merge_tokens import merge_tokens
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.self_attention import self_attention
from pallas_kernels.slot_mapping import slot_mapping

__all__ = [
    "argmax_token",
    "feed_forward",
    "kv_write",
    "merge_tokens",
    "paged_attention",
    "self_attention",
    "slot_mapping",
]
