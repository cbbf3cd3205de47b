"""MLPs: the second half of a layer.

Each MLP is a file, named by `LayerConfig.mlp`, with two functions. `declare(layer, config, own, dtype)` adds the MLP's
parameters to a Layer. `feed_forward(layer, x, mixed, backend, **following)` adds the result of the layer's mixer (such
as attention), `mixed` times the parameter `out`, to x. To this sum `feed_forward` adds the output of the MLP.
"""

from jaxspec.models.mlps import gated, layer_embedding

MLPS = {"gated": gated, "layer_embedding": layer_embedding}
