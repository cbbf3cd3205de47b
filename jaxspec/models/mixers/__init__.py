"""The first halves of a layer, which mix the tokens of a row. A file each, by the name in `LayerConfig.mixer`.

A file has two functions. `declare(layer, config, own, dtype, entry)` adds the parameters to a Layer. `mix(layer, x,
normed, memory, read, rows, ropes, backend, **options)` gives the mixed x [B,T,_], which the layer multiplies with its
parameter `out`, and what the layer remembers afterwards.
"""

from jaxspec.models.mixers import attention

MIXERS = {"attention": attention}
