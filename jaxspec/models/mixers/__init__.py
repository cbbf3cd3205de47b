"""Mixers, such as attention: the first half of a layer, which mixes information between the tokens of a row.

Each mixer is a file, named by `LayerConfig.mixer`, with three functions. `declare(layer, config, own, dtype, entry)`
adds the mixer's parameters to a Layer. `layer_layout(own, dtype, platform)` returns the LayerLayout of the layer's
cache; a mixer without a cache of its own has no such function. `mix(layer, x, normed, memory, read, rows, ropes,
backend, **options)` returns the mixed x [B,T,_] and the layer's updated cache. The MLP multiplies the mixed x with the
layer's parameter `out`.
"""

from jaxspec.models.mixers import attention, queries

MIXERS = {"attention": attention, "queries": queries}
