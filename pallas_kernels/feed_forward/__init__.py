import jax

from pallas_kernels.forms import Op, Where, check_shape, plain, triton
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
    platform: Where = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The second half of a decoder layer: `x += mixed @ out`, then `x += (act(gate) * up) @ down` of the normed x.

    Args:
      x: [..., E], what the layer got.
      mixed: [..., H * D], what its attention gave.
      out: [H * D, E]; gate_up: [E, 2F], columns in blocks, `block` of gate and `block` of up in turn; down: [F, E].
        Weights in any form.
      norm: f32[E], scale of the RMSNorm before gate_up.
      eps: of all norms.
      post_attention_norm, post_mlp_norm: f32[E], scales of RMSNorms of what is added to x; None for none.
      next_norm: f32[E], scale of the RMSNorm that the next op begins with, if it does.
      next_qkv: [E, ...], the matrix that the next op reads first, if it does: a kernel may ask for it ahead.
      activation: "silu" or "gelu_tanh".
      block: divides F.
      sum_over: the mesh axes over which heads and F are cut, within `jax.shard_map`: both products are then added up.
      implementation: None (the best known for these arrays there), "reference" (plain jnp) or "pallas" (a kernel where
        there is one for them).
      platform: None (the default backend), "cpu", "gpu", "tpu" or a `Device`; name it when compiling for another.

    Returns:
      [..., E] in the dtype of x; and the same normed by next_norm where a kernel had it at hand, else None: for
      `self_attention`, which takes it or norms x itself.

    Raises:
      ValueError: shapes that do not fit, an unknown implementation or platform.
    """
    (f, e), (a, _) = down.shape, out.shape
    check_shape("feed_forward", "x", x, *x.shape[:-1], e)
    check_shape("feed_forward", "mixed", mixed, *x.shape[:-1], a)
    check_shape("feed_forward", "out", out, a, e)
    check_shape("feed_forward", "gate_up", gate_up, e, 2 * f)
    if f % block:
        raise ValueError(f"feed_forward: blocks of {block} do not divide {f} columns of gate")
    arrays = (x, mixed, out, norm, gate_up, down, post_attention_norm, post_mlp_norm, next_norm, next_qkv)
    options = {"eps": eps, "activation": activation, "block": block, "sum_over": sum_over}
    return OP.run(implementation, platform, *arrays, **options)
