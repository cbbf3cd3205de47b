"""feed_forward on GPU for one row: three products, each of which finishes the one before it (see `_split_product`)."""

from pallas_kernels import _split_product
from pallas_kernels._split_product import split_product


def fits(x, out, gate_up, down, sandwich, block) -> bool:
    """The shapes that the kernels cover and are meant for."""
    return not sandwich and block % _split_product.STEP == 0 and _split_product.fits(x, out, gate_up, down)


def feed_forward(
    x, mixed, out, norm, gate_up, down, post_attention_norm, post_mlp_norm, *, eps, activation, block, interpret=False
):
    if post_attention_norm is not None or post_mlp_norm is not None or x.size != x.shape[-1]:
        raise NotImplementedError("feed_forward's kernels take one row and no post norms: use implementation=None")
    columns, _ = _split_product.tile(*down.shape)
    first = split_product(mixed.reshape(-1), out, zeros=down.shape[1] // columns, interpret=interpret)
    both = split_product(x.reshape(-1), gate_up, norm=norm, parts=first["parts"], interpret=interpret)
    done = split_product(
        None, down, gated=(both["parts"], activation, block, x.size), finish=(both["new_x"], first["zeros"]), eps=eps,
        interpret=interpret,
    )  # fmt: skip
    return done["out"].reshape(x.shape)
