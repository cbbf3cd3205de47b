"""The op argmax_token, which computes the greedy (most probable) token from hidden states."""

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
    """Return the id of the largest logit, `argmax(x @ table.T)`. Of ids with equal logits the lowest is returned.

    Args:
      x: [..., E], hidden states after the model's last norm.
      table: [V, E], the embedding table, which is also the output head.
      num_ids: number of ids to choose from, which are the first rows of the table; None for all V.
      implementation: None for the best known implementation on the platform, "reference" for plain jnp, "pallas" for a
        Pallas kernel if one supports these arrays, else plain jnp.
      platform: platform to compile for, "cpu", "gpu", "tpu" or a `Device`; None for JAX's default backend.

    Returns:
      i32[...], the token ids.

    Raises:
      ValueError: shapes that do not fit each other, an unknown implementation or platform.
    """
    num_ids = table.shape[0] if num_ids is None else min(num_ids, table.shape[0])
    check_shape("argmax_token", "table", table, table.shape[0], x.shape[-1])
    result: jax.Array = OP.run(implementation, platform, x, table, num_ids=num_ids)
    return result
