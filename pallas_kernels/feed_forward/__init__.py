import jax

from pallas_kernels.forms import DeviceLike, Op, check_shape, plain, triton
from pallas_kernels.weights import AnyWeight

OP = Op("feed_forward", (triton(best=True), plain("device")))


def feed_forward(
    x: jax.Array,
    mixed: jax.Array,
    out: AnyWeight,
    gate_up: AnyWeight,
    down: AnyWeight,
    *,
    norm: jax.Array,
    eps: float,
    post_attention_norm: jax.Array | None = None,
    post_mlp_norm: jax.Array | None = None,
    next_norm: jax.Array | None = None,
    next_qkv: AnyWeight | None = None,
    activation: str = "silu",
    block: int,
    sum_over: tuple[str, ...] = (),
    implementation: str | None = None,
    platform: DeviceLike = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the second half of a decoder layer: `x += mixed @ out`, then `x += (act(gate) * up) @ down`.

    gate and up are the product of the normed x with gate_up.

    Args:
      x: [..., E], the input of the layer.
      mixed: [..., H * D], the result of the layer's attention.
      out: [H * D, E], in any form of weight, like gate_up and down.
      gate_up: [E, 2F], columns in blocks, `block` of gate and `block` of up in turn.
      down: [F, E].
      norm: f32[E], scale of the RMSNorm before gate_up.
      eps: epsilon of all norms.
      post_attention_norm, post_mlp_norm: f32[E], scales of RMSNorms of each product before it is added to x, or None.
      next_norm: f32[E], scale of the RMSNorm that the next op begins with, or None.
      next_qkv: [E, ...], the matrix that the next op reads first, or None. A kernel may prefetch it.
      activation: "silu" or "gelu_tanh".
      block: number of columns of a block, a divisor of F.
      sum_over: mesh axes over which heads and F are sharded, within `jax.shard_map`. Both products are then summed over
        these axes.
      implementation: None (the best known form for these arrays on the platform), "reference" (plain jnp) or "pallas"
        (the kernel where one covers these arrays, else plain jnp).
      platform: "cpu", "gpu", "tpu" or a `Device`, to compile for another platform; None: the default backend.

    Returns:
      [..., E] in the dtype of x; and the same normed by next_norm where the kernel computed it, else None.
      `self_attention` takes the normed x if there is one, and norms x itself otherwise.

    Raises:
      ValueError: shapes that do not fit, an unknown implementation or platform.
    """
    f, e = down.shape
    a, _ = out.shape
    check_shape("feed_forward", "x", x, *x.shape[:-1], e)
    check_shape("feed_forward", "mixed", mixed, *x.shape[:-1], a)
    check_shape("feed_forward", "out", out, a, e)
    check_shape("feed_forward", "gate_up", gate_up, e, 2 * f)
    if f % block:
        raise ValueError(f"feed_forward: blocks of {block} do not divide {f} columns of gate")
    arrays = (x, mixed, out, norm, gate_up, down, post_attention_norm, post_mlp_norm, next_norm, next_qkv)
    options = {"eps": eps, "activation": activation, "block": block, "sum_over": sum_over}
    return OP.run(implementation, platform, *arrays, **options)
