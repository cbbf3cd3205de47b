"""feed_forward on GPU: three products, each of which finishes the one before it (see `_split_product`)."""

import math

from pallas_kernels import _split_product
from pallas_kernels._split_product import Parts, choose_tile, split_product


def fits(x, out, gate_up, down, sandwich, block) -> bool:
    """The shapes that the kernels cover and are meant for."""
    return not sandwich and block % _split_product.STEP == 0 and _split_product.fits(x, out, gate_up, down)


def feed_forward(
    x, mixed, out, norm, gate_up, down, post_attention_norm, post_mlp_norm, *,
    eps, activation, block, tiles=(None, None, None), interpret=False,
):  # fmt: skip
    if post_attention_norm is not None or post_mlp_norm is not None:
        raise NotImplementedError("feed_forward has no kernel with post norms: pass implementation='reference'")
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    x_in, mixed = x.reshape(rows, width), mixed.reshape(rows, -1)
    last = tiles[2] or choose_tile(*down.shape, rows)
    first = split_product(mixed, out, zeros=width // last.columns, tile=tiles[0], interpret=interpret)
    both = split_product(x_in, gate_up, norm=norm, parts=first["parts"], tile=tiles[1], interpret=interpret)
    gate = Parts(both["sums"], both["squares"])
    done = split_product(
        None, down, gated=(gate, width, activation, block), finish=(both["new_x"], first["zeros"]), eps=eps, tile=last,
        interpret=interpret,
    )  # fmt: skip
    return done["out"].reshape(x.shape)
