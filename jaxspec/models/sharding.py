"""Tensor parallelism of a model: copies of key-value heads, and the sizes that the number of shards must divide."""

from __future__ import annotations

import dataclasses

from jaxspec.common.errors import UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.draft_spec import HeadConfig, draft_spec
from jaxspec.models.layer_config import LayerConfig, mlp_block


def for_degree(config: ModelConfig, degree: int) -> ModelConfig:
    """Return the configuration of a model for `degree` shards.

    In a layer with fewer key-value heads than shards, each of these heads is copied, so that every shard has one
    key-value head and its query heads. The configuration of a drafting head is returned unchanged.
    """
    if isinstance(config, HeadConfig):
        return config
    layers = tuple(copied(layer, degree) for layer in config.layers)
    uniform = dataclasses.replace(config, num_kv_heads=own_heads(layers[0]), per_layer=())
    if uniform.layers == layers:
        return uniform
    return dataclasses.replace(config, num_kv_heads=layers[0].num_kv_heads, per_layer=layers)


def own_heads(layer: LayerConfig) -> int:
    """Return a layer's number of key-value heads in the checkpoint, without copies."""
    return layer.num_kv_heads // layer.kv_copies


def copied(layer: LayerConfig, degree: int) -> LayerConfig:
    """Return a layer with its key-value heads copied for `degree` shards, if the sizes allow it."""
    own = own_heads(layer)
    copies = degree // own if degree % own == 0 and layer.num_heads % degree == 0 else 1
    if copies == layer.kv_copies:
        return layer
    block = mlp_block(layer.mlp_width, min(own, 8) if copies == 1 else degree)
    return dataclasses.replace(layer, num_kv_heads=own * copies, kv_copies=copies, mlp_block=block)


def divided_sizes(config: ModelConfig) -> dict[str, list[int]]:
    """Return the sizes that the degree of tensor parallelism must divide, by name; some have one value per layer."""
    sizes = {
        "num_heads": [layer.num_heads for layer in config.layers],
        "num_key_value_heads": [layer.num_kv_heads for layer in config.layers],
    }
    blocks = {layer.mlp_block: layer.mlp_width // layer.mlp_block for layer in config.layers}
    for block, count in blocks.items():
        sizes[f"intermediate_size / {block}"] = [count]
    features = draft_spec(config).features_width
    if features:
        sizes["the features of a position"] = [features]
    return sizes


def check_divides(config: ModelConfig, degree: int, *, most: int | None = None, of_draft: bool = False) -> None:
    """Raise UserError if this degree of tensor parallelism does not divide all sizes of a model.

    The message names the size, and the possible degrees.

    most: highest possible degree; for a draft, the target's degree.
    of_draft: whether the model is a draft, whose degree has an option of its own.
    """
    size = undivided(config, degree)
    if size is None:
        return
    option = "draft_tensor_parallel_size" if of_draft else "tensor_parallel_size"
    able = [d for d in range(1, (most or config.num_heads) + 1) if undivided(config, d) is None]
    if of_draft:  # a draft's degree must divide the target's
        able = [d for d in able if (most or degree) % d == 0]
    raise UserError(f"{option}={degree} does not divide {size}: use one of {', '.join(map(str, able))}")


def undivided(config: ModelConfig, degree: int) -> str | None:
    """Return the first size that this degree does not divide once key-value heads are copied; None if none."""
    for name, values in divided_sizes(for_degree(config, degree)).items():
        for size in values:
            if size % degree:
                return f"{name}={size}"
    return None
