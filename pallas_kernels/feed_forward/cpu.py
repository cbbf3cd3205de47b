"""feed_forward on CPU: the plain form, with products that stream their weights (see `_streamed`)."""

import functools

from pallas_kernels._streamed import linear
from pallas_kernels.feed_forward import reference

feed_forward = functools.partial(reference.feed_forward, linear=linear)
