"""The op kv_write, which writes new keys and values into the paged KV cache."""

import jax

from pallas_kernels.forms import DeviceLike, Op, check_shape, mosaic, plain, triton

# On an H200 plain jnp takes 5 us for up to 80 tokens, the Triton kernel 4 to 15 us. So plain jnp is the best on GPU.
OP = Op("kv_write", (mosaic(best=True), triton(), plain()))


def kv_write(
    pages: jax.Array,
    kv: jax.Array,
    slots: jax.Array,
    *,
    implementation: str | None = None,
    platform: DeviceLike = None,
) -> jax.Array:
    """Write new keys and values into the paged cache: `pages[slot // S, slot % S] = kv[i]`, with `slot = slots[i]`.

    The write happens in place if `pages` is donated or is the carry of a loop. On TPU, `pages` must be laid out
    row-major (`jax.experimental.layout`). For narrow heads the compiler would choose another layout by itself.

    Args:
      pages: [P, S, 2G, D], keys (even index) and values (odd index) interleaved by head.
      kv: [B * T, 2G, D], new keys and values, interleaved like `pages`. They are cast to the dtype of `pages`.
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
    check_shape("kv_write", "kv", kv, m, *pages.shape[2:])
    result: jax.Array = OP.run(implementation, platform, pages, kv.astype(pages.dtype), slots)
    return result
