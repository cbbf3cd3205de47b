import jax

from pallas_kernels.forms import DeviceLike, Op, check_shape, mosaic, plain, triton

# On an H200 plain jnp takes 5 us for up to 80 tokens, the kernel 4 to 15 us. So the kernel is not the best form on GPU.
OP = Op("kv_write", (mosaic(best=True), triton(), plain()))


def kv_write(
    pages: jax.Array,
    kv: jax.Array,
    slots: jax.Array,
    *,
    implementation: str | None = None,
    platform: DeviceLike = None,
) -> jax.Array:
    """Write new keys and values into the paged cache: `pages[slot // S, slot % S] = kv[i]`.

    The write happens in place if `pages` is donated or the carry of a loop. On TPU, `pages` must be laid out row-major
    (`jax.experimental.layout`); for narrow heads the compiler would choose another layout.

    Args:
      pages: [P, S, 2G, D], keys (even index) and values (odd index) interleaved by head.
      kv: [B * T, 2G, D], interleaved like `pages`, and cast to the dtype of `pages`.
      slots: i32[B * T] from `slot_mapping`. Slots outside `[0, P * S)` are dropped; all other slots must differ.
      implementation: None (the best known form for these arrays on the platform), "reference" (plain jnp) or "pallas"
        (the kernel where one covers these arrays, else plain jnp).
      platform: "cpu", "gpu", "tpu" or a `Device`, to compile for another platform; None: the default backend.

    Returns:
      pages, updated.

    Raises:
      ValueError: shapes that do not fit, an unknown implementation or platform.
    """
    (m,) = slots.shape
    check_shape("kv_write", "kv", kv, m, *pages.shape[2:])
    return OP.run(implementation, platform, pages, kv.astype(pages.dtype), slots)
