"""The sharded layout of a model: which sizes a degree of tensor parallelism divides, and copies of key-value heads."""

from __future__ import annotations

import dataclasses

from jaxspec.common.errors import UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.draft_spec import HeadConfig, draft_spec
from jaxspec.models.layer_config import LayerConfig, mlp_block


def for_degree(config: ModelConfig, degree: int) -> ModelConfig:
    """Return the same model for so many shards.

    Where a layer has fewer key-value heads, each counts as often as it takes for a shard to have one, with its share of
    the query heads. Heads beside a target have no copies.
    """
    if isinstance(config, HeadConfig):
        return config
    layers = tuple(copied(layer, degree) for layer in config.layers)
    alike = dataclasses.replace(config, num_kv_heads=own_heads(layers[0]), per_layer=())
    if alike.layers == layers:
        return alike
    return dataclasses.replace(config, num_kv_heads=layers[0].num_kv_heads, per_layer=layers)


def own_heads(layer: LayerConfig) -> int:
    """Return the number of key-value heads that a checkpoint has of a layer."""
    return layer.num_kv_heads // layer.kv_copies


def copied(layer: LayerConfig, degree: int) -> LayerConfig:
    own = own_heads(layer)
    copies = degree // own if degree % own == 0 == layer.num_heads % degree else 1
    if copies == layer.kv_copies:
        return layer
    block = mlp_block(layer.mlp_width, min(own, 8) if copies == 1 else degree)
    return dataclasses.replace(layer, num_kv_heads=own * copies, kv_copies=copies, mlp_block=block)


def divided_sizes(config: ModelConfig) -> dict[str, list[int]]:
    """Return what a degree has to divide, by name: of each layer that has it, the size."""
    features = draft_spec(config).features_width
    sizes = {
        "num_heads": [layer.num_heads for layer in config.layers],
        "num_key_value_heads": [layer.num_kv_heads for layer in config.layers],
    }
    blocks = {layer.mlp_block: layer.mlp_width // layer.mlp_block for layer in config.layers}
    sizes |= {f"intermediate_size / {block}": [count] for block, count in blocks.items()}
    return sizes | ({"the features of a position": [features]} if features else {})


def check_divides(config: ModelConfig, degree: int, *, most: int | None = None, of_draft: bool = False) -> None:
    """Raise UserError naming a size that this degree does not divide, and the degrees that would do.

    most: the highest degree there could be, of a draft the target's.
    """
    if size := undivided(config, degree):
        option = "draft_tensor_parallel_size" if of_draft else "tensor_parallel_size"
        able = [d for d in range(1, (most or config.num_heads) + 1) if not undivided(config, d)]
        if of_draft:  # what divides its own divides the target's
            able = [d for d in able if (most or degree) % d == 0]
        raise UserError(f"{option}={degree} does not divide {size}: use one of {', '.join(map(str, able))}")


def undivided(config: ModelConfig, degree: int) -> str | None:
    """Return the first size that this degree does not divide, key-value heads being copied where they are fewer."""
    sizes = divided_sizes(for_degree(config, degree))
    return next((f"{name}={size}" for name, each in sizes.items() for size in each if size % degree), None)
