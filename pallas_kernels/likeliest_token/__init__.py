import jax

from pallas_kernels.forms import Op, Where, check_shape, plain, triton

OP = Op("likeliest_token", (triton(best=True), plain("device")))


def likeliest_token(
    x: jax.Array,
    table: jax.Array,
    *,
    num_ids: int | None = None,
    implementation: str | None = None,
    platform: Where = None,
) -> jax.Array:
    """The id of the largest logit: `argmax(x @ table.T)`, of ids as likely the lowest.

    Args:
      x: [..., E], hidden states by the model's last norm.
      table: [V, E], the embedding table that is the head too.
      num_ids: only the first so many are looked at; None for all V.
      implementation: None (the best known for these arrays there), "reference" (plain jnp) or "pallas" (a kernel where
        there is one for them).
      platform: None (the default backend), "cpu", "gpu", "tpu" or a `Device`; name it when compiling for another.

    Returns:
      i32[...].

    Raises:
      ValueError: shapes that do not fit, an unknown implementation or platform.
    """
    num_ids = table.shape[0] if num_ids is None else min(num_ids, table.shape[0])
    check_shape("likeliest_token", "table", table, table.shape[0], x.shape[-1])
    return OP.run(implementation, platform, x, table, num_ids=num_ids)
