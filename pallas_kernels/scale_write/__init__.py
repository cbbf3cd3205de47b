"""The op scale_write, which writes the scales of new 8-bit keys and values into the paged KV cache."""

import jax

from pallas_kernels.forms import DeviceLike, Op, check_shape, mosaic, plain

OP = Op("scale_write", (mosaic(best=True), plain()))


def scale_write(
    scales: jax.Array,
    new: jax.Array,
    slots: jax.Array,
    *,
    implementation: str | None = None,
    platform: DeviceLike = None,
) -> jax.Array:
    """Write the scales of new keys and values: `scales[slot // S, 0, h * S + slot % S] = new[i, h]`.

    Here `slot = slots[i]`. The write happens in place if `scales` is donated or is the carry of a loop.

    Args:
      scales: f32[P, 1, 2G * S], the scales of `ScaledPages`.
      new: f32[M, 2G], scales of the new keys and values.
      slots: i32[M] from `slot_mapping`. A token with a slot outside `[0, P * S)` is not written. All other slots must
        differ from each other, and those of a page must follow each other.
      implementation: None for the best known implementation on the platform, "reference" for plain jnp, "pallas" for a
        Pallas kernel if one supports these arrays, else plain jnp.
      platform: platform to compile for, "cpu", "gpu", "tpu" or a `Device`; None for JAX's default backend.

    Returns:
      The updated scales.

    Raises:
      ValueError: shapes that do not fit each other, an unknown implementation or platform.
    """
    m, heads = new.shape
    check_shape("scale_write", "slots", slots, m)
    if scales.shape[1] != 1 or scales.shape[2] % heads:
        raise ValueError(f"scale_write: {heads} new scales a token do not fit scales of shape {scales.shape}")
    result: jax.Array = OP.run(implementation, platform, scales, new, slots)
    return result
