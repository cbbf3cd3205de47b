import jax

from pallas_kernels._dispatch import check_shape, run


def fused_linear(
    x: jax.Array,
    weights: jax.Array,
    *,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    bias: jax.Array | None = None,
    activation: str | None = None,
    block: int | None = None,
    residual: jax.Array | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """A product with what surrounds it in a decoder: `residual + act(rms_norm(x) @ weights + bias)`.

    With an `activation`, the columns of the product alternate in blocks, `block` of gate and `block` of up, and the
    result is `activation(gate) * up`, half as wide.

    Args:
      x: [..., I].
      weights: [I, O], stored input-first: on CPU that form streams them fastest once several rows share a pass, which
        is what makes verifying K+1 tokens cheap.
      norm: f32[I], scale of an RMSNorm of x; None for none.
      eps: of the norm.
      bias: [O], or None.
      activation: None, "silu" or "gelu_tanh".
      block: divides O / 2; only with an activation.
      residual: [..., O], or O / 2 with an activation; None for none.
      implementation: None (the best known on the platform for these shapes), "reference" (plain jnp) or "pallas".
      platform: None (the default backend), "cpu", "gpu" or "tpu"; name it when compiling for another one.

    Returns:
      [..., O], or O / 2 with an activation, in the dtype of x.

    Raises:
      ValueError: shapes that do not fit, an unknown implementation or platform.
      NotImplementedError: implementation "pallas" on TPU.
    """
    depth, width = weights.shape
    check_shape("fused_linear", "x", x, *x.shape[:-1], depth)
    if activation is not None:
        if block is None or width % (2 * block):
            raise ValueError(f"fused_linear: {width} columns are no pairs of blocks of {block}")
        width //= 2
    for name, array, shape in (
        ("norm", norm, (depth,)),
        ("bias", bias, weights.shape[1:]),
        ("residual", residual, (*x.shape[:-1], width)),
    ):
        if array is not None:
            check_shape("fused_linear", name, array, *shape)
    fits = lambda gpu: gpu.fits(x, weights, activation, block)
    options = {"eps": eps, "activation": activation, "block": block}
    arrays = (x, weights, norm, bias, residual)
    return run("fused_linear", implementation, platform, *arrays, fits=fits, **options)
