"""self_attention on CPU: the plain form, with a product that streams its weights (see `_streamed`)."""

import functools

from pallas_kernels._streamed import linear
from pallas_kernels.self_attention import reference

self_attention = functools.partial(reference.self_attention, linear=linear)
