"""feed_forward on GPU for one row.

Small matrices: three products, each of which finishes the one before it (see `_split_product`). Others: the plain form
with products of more rows than one (see `_one_row`).
"""

import jax.numpy as jnp

from pallas_kernels import _one_row, _split_product
from pallas_kernels._split_product import split_product
from pallas_kernels.feed_forward import reference


def fits(x) -> bool:
    """The shapes that this form is meant for."""
    return x.size == x.shape[-1] and x.dtype == jnp.bfloat16


def feed_forward(
    x, mixed, out, norm, gate_up, down, post_attention_norm, post_mlp_norm, *, eps, activation, block, interpret=False
):
    if x.size != x.shape[-1]:
        raise NotImplementedError("feed_forward's kernels take one row: use implementation=None")
    sandwich = post_attention_norm is not None or post_mlp_norm is not None
    if sandwich or block % _split_product.STEP or not _split_product.covers(out, gate_up, down):
        arrays = x, mixed, out, norm, gate_up, down, post_attention_norm, post_mlp_norm
        options = {"eps": eps, "activation": activation, "block": block, "linear": _one_row.linear}
        return reference.feed_forward(*arrays, **options)
    columns, _ = _split_product.tile(*down.shape)
    first = split_product(mixed.reshape(-1), out, zeros=down.shape[1] // columns, interpret=interpret)
    both = split_product(x.reshape(-1), gate_up, norm=norm, parts=first["parts"], interpret=interpret)
    done = split_product(
        None, down, gated=(both["parts"], activation, block, x.size), finish=(both["new_x"], first["zeros"]), eps=eps,
        interpret=interpret,
    )  # fmt: skip
    return done["out"].reshape(x.shape)
