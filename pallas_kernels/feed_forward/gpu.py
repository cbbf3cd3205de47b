"""The op feed_forward on GPU for a few rows of x.

For one row and small matrices there are three kernels, one for each product. Each adds up the partial sums of the
product before (see `_split_product`). For more rows or larger matrices there are three kernels for products, and
kernels for the sum and norm after the first product and after the last (see `_few_rows`). Plain jnp computes all other
cases.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _add_and_norm, _few_rows, _peer_sum, _split_product, _tiling
from pallas_kernels._split_product import split_product
from pallas_kernels.device import Device
from pallas_kernels.feed_forward import reference
from pallas_kernels.plain import total
from pallas_kernels.weights.interleaved import Interleaved
from pallas_kernels.weights.interleaved_grouped import InterleavedGrouped
from pallas_kernels.weights.scaled import Scaled

READS = (Scaled.form, Interleaved.form, InterleavedGrouped.form)


def num_rows(x: jax.Array) -> int:
    """Return the number of rows of x [..., E]."""
    return x.size // x.shape[-1]


def rounded_for(weight: Any, rows: int, device: Device) -> str | None:
    """Return the dtype to which activations are quantised for the product with `weight`.

    Return None if the kernel for this product leaves them as they are, or if no kernel computes it.
    """
    return weight.activations if isinstance(weight, Scaled) and _tiling.covers(rows, weight, device=device) else None


def fits(x: jax.Array, *_: Any, device: Device, **options: Any) -> bool:
    """Return whether the kernels are meant for these arguments."""
    rows = num_rows(x)
    return x.dtype == jnp.bfloat16 and (rows == 1 or _tiling.covers(rows, device=device))


def feed_forward(
    x: jax.Array,
    mixed: jax.Array,
    out: jax.Array,
    norm: jax.Array | None,
    gate_up: jax.Array,
    down: jax.Array,
    post_attention_norm: jax.Array | None,
    post_mlp_norm: jax.Array | None,
    next_norm: jax.Array | None,
    next_qkv: jax.Array | None = None,
    mailbox: _peer_sum.Mailbox | None = None,
    *,
    eps: float,
    activation: str,
    block: int,
    sum_over: tuple[str, ...] = (),
    post_eps: float | None = None,
    device: Device,
) -> tuple[jax.Array, jax.Array | None]:
    """Choose the kernels for these arguments and run them. If no kernel supports them, use plain jnp."""
    rows, matrices = num_rows(x), (out, gate_up, down)
    plain = post_attention_norm is None and post_mlp_norm is None and block % _split_product.STEP == 0
    plain = plain and norm is not None
    # If the results of several devices have to be summed between two products, the second product's kernel cannot add
    # up the first's partial sums. One row is then computed like a few rows.
    if plain and not sum_over and rows == 1 and _split_product.covers(*matrices):
        columns, _ = _split_product.tile(*down.shape)
        first = split_product(mixed.reshape(-1), out, zeros=down.shape[1] // columns, device=device)
        both = split_product(x.reshape(-1), gate_up, norm=norm, parts=first["parts"], device=device)
        done = split_product(
            None, down, gated=(both["parts"], activation, block, x.size), finish=(both["new_x"], first["zeros"]),
            eps=eps, device=device,
        )  # fmt: skip
        return done["out"].reshape(x.shape), None
    if plain and _tiling.covers(rows, *matrices, device=device):
        product = functools.partial(_few_rows.product, device=device)

        def summed(parts: jax.Array) -> jax.Array:
            """Return partial sums [splits, rows, width]; with `sum_over`, one part [1, rows, width] of all devices."""
            return total(jnp.sum(parts, axis=0, keepdims=True), sum_over) if sum_over else parts

        def sum_and_norm(x: jax.Array, parts: jax.Array, norm: Any, then: Any) -> tuple[jax.Array, Any]:
            """Return x + the sum of all devices' parts, and its norm. then: the next matrix."""
            # The kernel of a norm rounds, or adds up, what would take a kernel of its own otherwise.
            rounded, sums = rounded_for(then, rows, device), _few_rows.sums_for(then, rows, device)
            how: dict[str, Any] = {"summed": sums, "device": device}
            result: tuple[jax.Array, Any]
            if mailbox is not None:
                result = _peer_sum.sum_and_norm(x, parts, norm, eps, mailbox, rounded=rounded, **how)
            elif rounded or not _few_rows.multiplies(then, rows, device):
                result = _add_and_norm.add_and_norm(x, summed(parts), norm, eps, rounded=rounded, **how)
            else:
                result = _add_and_norm.add_and_scale(x, summed(parts), norm, eps, **how)
            return result

        parts = product(jax.tree.map(lambda array: array.reshape(rows, -1), mixed), out, then=gate_up)
        flat, normed = sum_and_norm(x.reshape(rows, -1), parts, norm, gate_up)
        gated = product(normed, gate_up, gated=(activation, block), then=down)
        parts = product(gated, down, then=next_qkv)
        if next_norm is None:
            return (flat + jnp.sum(summed(parts), axis=0)).astype(x.dtype).reshape(x.shape), None
        flat, normed = sum_and_norm(flat, parts, next_norm, next_qkv)
        return flat.reshape(x.shape), jax.tree.map(lambda array: array.reshape(*x.shape[:-1], -1), normed)
    arrays = x, mixed, out, norm, gate_up, down, post_attention_norm, post_mlp_norm, next_norm, next_qkv
    options: dict[str, Any] = {
        "eps": eps,
        "activation": activation,
        "block": block,
        "sum_over": sum_over,
        "post_eps": post_eps,
        "device": device,
    }
    return reference.feed_forward(*arrays, **options)
