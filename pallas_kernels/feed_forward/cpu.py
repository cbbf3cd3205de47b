"""feed_forward on CPU: the plain form, with products that stream their weights (see `streamed`)."""

import functools

from pallas_kernels.feed_forward import reference
from pallas_kernels.streamed import linear

feed_forward = functools.partial(reference.feed_forward, linear=linear)
