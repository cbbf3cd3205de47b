"""The op feed_forward, which computes the second half of a decoder layer."""

from typing import Any

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
    norm: jax.Array | None = None,
    eps: float,
    post_attention_norm: jax.Array | None = None,
    post_mlp_norm: jax.Array | None = None,
    post_eps: float | None = None,
    next_norm: jax.Array | None = None,
    next_qkv: AnyWeight | None = None,
    mailbox: tuple[jax.Array, jax.Array] | None = None,
    activation: str = "silu",
    block: int,
    sum_over: tuple[str, ...] = (),
    implementation: str | None = None,
    platform: DeviceLike = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the second half of a decoder layer: `x += mixed @ out`, then `x += (act(gate) * up) @ down`.

    `gate` and `up` are the columns of `rms_norm(x) @ gate_up`, or of `x @ gate_up` without a norm.

    Args:
      x: [..., E], the input of the layer.
      mixed: [..., H * D], the result of the layer's attention, as `self_attention` returns it.
      out: [H * D, E], output projection of attention. Like gate_up and down, a plain array or any `Weight`.
      gate_up: [E, 2F], merged gate and up projections: `block` columns of gate and `block` columns of up in turn.
      down: [F, E], down projection.
      norm: f32[E], scale of the RMSNorm before gate_up, or None for no norm there.
      eps: epsilon of all norms but those that post_eps is for.
      post_attention_norm: f32[E], scale of an RMSNorm of the first product before it is added to x, or None.
      post_mlp_norm: f32[E], scale of an RMSNorm of the last product before it is added to x, or None.
      post_eps: epsilon of post_attention_norm and post_mlp_norm; None for eps.
      next_norm: f32[E], scale of the RMSNorm with which the next op begins, or None.
      next_qkv: [E, ...], the weight matrix that the next op reads first, or None. A kernel may prefetch it.
      mailbox: memory through which two GPUs exchange partial sums (`_peer_sum`), so that a kernel computes sums over
        `sum_over`; None to leave these sums to the compiler.
      activation: "silu" or "gelu_tanh".
      block: number of consecutive columns of gate or up in gate_up, a divisor of F.
      sum_over: mesh axes over which heads and F are sharded, inside `jax.shard_map`. Both products are then summed over
        these axes.
      implementation: None for the best known implementation on the platform, "reference" for plain jnp, "pallas" for a
        Pallas kernel if one supports these arrays, else plain jnp.
      platform: platform to compile for, "cpu", "gpu", "tpu" or a `Device`; None for JAX's default backend.

    Returns:
      The new x, [..., E] in the dtype of x; and its RMSNorm with scale next_norm if a kernel computed this, else None.
      `self_attention` takes the normed x if there is one, and computes it otherwise. If next_qkv rounds activations,
      the normed x may be rounded already, as a tuple like that of `round_rows`.

    Raises:
      ValueError: shapes that do not fit each other, an unknown implementation or platform.
    """
    f, e = down.shape
    a, _ = out.shape
    check_shape("feed_forward", "x", x, *x.shape[:-1], e)
    check_shape("feed_forward", "mixed", mixed, *x.shape[:-1], a)
    check_shape("feed_forward", "out", out, a, e)
    check_shape("feed_forward", "gate_up", gate_up, e, 2 * f)
    if f % block:
        raise ValueError(f"feed_forward: blocks of {block} do not divide {f} columns of gate")
    arrays = (x, mixed, out, norm, gate_up, down, post_attention_norm, post_mlp_norm, next_norm, next_qkv, mailbox)
    options: dict[str, Any] = {"eps": eps, "activation": activation, "block": block, "sum_over": sum_over}
    if post_eps is not None:
        options["post_eps"] = post_eps
    result: tuple[jax.Array, jax.Array | None] = OP.run(implementation, platform, *arrays, **options)
    return result
