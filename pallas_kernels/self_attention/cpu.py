"""self_attention on CPU: the plain form, with a product that streams its weights (see `streamed`)."""

import functools

from pallas_kernels.self_attention import reference
from pallas_kernels.streamed import linear

self_attention = functools.partial(reference.self_attention, linear=linear)
