import jax

from pallas_kernels._dispatch import check_shape, run


def likeliest_token(
    x: jax.Array,
    table: jax.Array,
    *,
    num_ids: int | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """The id of the largest logit: `argmax(x @ table.T)`, of ids as likely the lowest.

    Args:
      x: [..., E], hidden states by the model's last norm.
      table: [V, E], the embedding table that is the head too.
      num_ids: only the first so many are looked at; None for all V.
      implementation: None (the best known on the platform for these shapes), "reference" (plain jnp) or "pallas",
        whose logits never leave the chip.
      platform: None (the default backend), "cpu", "gpu" or "tpu"; name it when compiling for another one.

    Returns:
      i32[...].

    Raises:
      ValueError: shapes that do not fit, an unknown implementation or platform.
      NotImplementedError: implementation "pallas" on TPU, or for what its kernel does not take.
    """
    num_ids = table.shape[0] if num_ids is None else min(num_ids, table.shape[0])
    check_shape("likeliest_token", "table", table, table.shape[0], x.shape[-1])
    fits = lambda gpu: gpu.fits(x, table)
    return run("likeliest_token", implementation, platform, x, table, fits=fits, num_ids=num_ids)
