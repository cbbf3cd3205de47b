"""MLPs: the second half of a layer. One file each, named by `LayerConfig.mlp`.

Each file has two functions. `declare(layer, config, own, dtype)` adds the parameters to a Layer. `feed_forward(layer,
x, mixed, backend, **following)` adds the mixer's result, `mixed` times the parameter `out`, to x. To this sum it adds
the output of the MLP.
"""

from jaxspec.models.mlps import gated

MLPS = {"gated": gated}
