"""The op kv_write, which writes new keys and values into the paged KV cache."""

from typing import Any

import jax

from pallas_kernels.forms import DeviceLike, Op, check_shape, mosaic, plain, triton
from pallas_kernels.pages import AnyEntries, AnyPages, ScaledEntries, ScaledPages, quantised
from pallas_kernels.scale_write import scale_write

# On an H200 plain jnp takes 5 us for up to 80 tokens, the Triton kernel 4 to 15 us. So plain jnp is the best on GPU.
OP = Op("kv_write", (mosaic(best=True), triton(), plain()))


def kv_write(
    pages: AnyPages,
    kv: AnyEntries,
    slots: jax.Array,
    *,
    implementation: str | None = None,
    platform: DeviceLike = None,
) -> AnyPages:
    """Write new keys and values into the paged cache: `pages[slot // S, slot % S] = kv[i]`, with `slot = slots[i]`.

    The write happens in place if `pages` is donated or is the carry of a loop. On TPU, `pages` must be laid out
    row-major (`jax.experimental.layout`). For narrow heads the compiler would choose another layout by itself.

    Args:
      pages: [P, S, 2G, D], keys (even index) and values (odd index) interleaved by head; a plain array or
        `ScaledPages`.
      kv: [B * T, 2G, D], new keys and values, interleaved like `pages`. They are cast to the dtype of `pages`; for
        `ScaledPages` they are rounded with scales, unless they are `ScaledEntries` already.
      slots: i32[B * T] from `slot_mapping`. A token with a slot outside `[0, P * S)` is not written. All other slots
        must differ from each other.
      implementation: None for the best known implementation on the platform, "reference" for plain jnp, "pallas" for a
        Pallas kernel if one supports these arrays, else plain jnp.
      platform: platform to compile for, "cpu", "gpu", "tpu" or a `Device`; None for JAX's default backend.

    Returns:
      The updated pages.

    Raises:
      ValueError: shapes that do not fit each other, an unknown implementation or platform.
    """
    (m,) = slots.shape
    how: dict[str, Any] = {"implementation": implementation, "platform": platform}
    new = kv
    if isinstance(pages, ScaledPages) and not isinstance(kv, ScaledEntries):
        new = quantised(kv, pages.dtype)
    values = new.values if isinstance(new, ScaledEntries) else new.astype(pages.dtype)
    check_shape("kv_write", "kv", values, m, *pages.shape[2:])
    stored = pages.values if isinstance(pages, ScaledPages) else pages
    written: jax.Array = OP.run(implementation, platform, stored, values, slots)
    if isinstance(pages, ScaledPages) and isinstance(new, ScaledEntries):
        return ScaledPages(written, scale_write(pages.scales, new.scales, slots, **how))
    return written
