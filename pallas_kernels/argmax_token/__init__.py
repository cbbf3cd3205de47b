import jax

from pallas_kernels.forms import DeviceLike, Op, check_shape, plain, triton

OP = Op("argmax_token", (triton(best=True), plain("device")))


def argmax_token(
    x: jax.Array,
    table: jax.Array,
    *,
    num_ids: int | None = None,
    implementation: str | None = None,
    platform: DeviceLike = None,
) -> jax.Array:
    """Return the id of the largest logit, `argmax(x @ table.T)`; the lowest of ids with equal logits.

    Args:
      x: [..., E], hidden states after the model's last norm.
      table: [V, E], the embedding table, which is also the output head.
      num_ids: number of ids to choose from, the first ones of the table; None for all V.
      implementation: None (the best known form for these arrays on the platform), "reference" (plain jnp) or "pallas"
        (the kernel where one covers these arrays, else plain jnp).
      platform: "cpu", "gpu", "tpu" or a `Device`, to compile for another platform; None: the default backend.

    Returns:
      i32[...].

    Raises:
      ValueError: shapes that do not fit, an unknown implementation or platform.
    """
    num_ids = table.shape[0] if num_ids is None else min(num_ids, table.shape[0])
    check_shape("argmax_token", "table", table, table.shape[0], x.shape[-1])
    return OP.run(implementation, platform, x, table, num_ids=num_ids)
