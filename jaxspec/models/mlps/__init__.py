"""The second halves of a layer. A file each, by the name in `LayerConfig.mlp`.

A file has two functions. `declare(layer, config, own, dtype)` adds the parameters to a Layer. `feed_forward(layer, x,
mixed, backend, **following)` adds the mixer's result, `mixed` times the parameter `out`, to x, and then the MLP's.
"""

from jaxspec.models.mlps import gated

MLPS = {"gated": gated}
