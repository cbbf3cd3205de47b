"""Heads beside a target: what their checkpoints have in common, whichever method they are for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import Place
from jaxspec.models.limits import number, short


@dataclasses.dataclass(frozen=True)
class Found:
    """A head's checkpoint, before its weights are read.

    name: what to call it; raw: its config.json; shapes: of its tensors.
    target: the model that it is to draft for, target_name what to call that.
    parse: a model's config.json -> its ModelConfig.
    """

    name: str
    raw: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    target: ModelConfig
    target_name: str
    parse: Callable[[Mapping[str, Any]], ModelConfig]

    def has(self, *starts: str) -> bool:
        """Whether some tensor's name starts with one of these, but for the prefix."""
        return any(name.removeprefix(self.prefix).startswith(starts) for name in self.shapes)

    @property
    def prefix(self) -> str:
        """What some writers put before most names."""
        return "model." if any(name.startswith("model.") for name in self.shapes) else ""

    def named(self, names: Mapping[str, Place]) -> dict[str, Place]:
        """The same, with that prefix where the checkpoint has it."""
        return {name if name in self.shapes else self.prefix + name: place for name, place in names.items()}

    def layers(self, **changes: Any) -> dict[str, Any]:
        """The fields of its layers' ModelConfig, read from config.json as of a Llama. It reads and proposes the
        target's ids, and its context is the target's: what a head's own config says of it is seldom meant."""
        ids = {"vocab_size": self.target.vocab_size, "max_position_embeddings": self.target.max_model_len}
        # Where config.json says nothing, Llama's own defaults are meant, whatever the target has.
        raw = {"rope_theta": 1e4, **self.raw, **ids, "model_type": "llama", "tie_word_embeddings": False, **changes}
        fields = vars(self.parse({key: value for key, value in raw.items() if value is not None}))
        there = lambda end: any(name.endswith(end) for name in self.shapes)
        return fields | {"qkv_bias": there("self_attn.q_proj.bias"), "qk_norm": there("self_attn.q_norm.weight")}

    def fits(self, what: str, own: int, targets: int) -> None:
        """Raises UserError where the head was made for another target."""
        if own != targets:
            raise UserError(
                f"the draft {self.name!r} was made for a target of {what} {own}, {self.target_name!r} has {targets}: "
                "give it the target that it was trained for"
            )

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.name}: {key}={short(value)} must be true or false")
        return value

    def whole(self, key: str, default: Any = None, kind: str = "vocab_size") -> Any:
        """A number of config.json; kind: of LIMITS."""
        value = self.raw.get(key, default)
        return value if value is None else number(kind, value, key)

    def taps(self, ids: Any, default: tuple[int, ...], key: str) -> tuple[int, ...]:
        """Layers of the target whose input the head reads; L is what goes into the last norm."""
        chosen, most = default if ids is None else ids, self.target.num_layers
        whole = isinstance(chosen, list | tuple) and all(isinstance(i, int) and 0 <= i <= most for i in chosen)
        if not whole or not chosen:
            raise UserError(
                f"the draft {self.name!r} reads layers {key}={short(chosen)}, {self.target_name!r} has 0..{most}: give "
                "it the target that it was trained for"
            )
        return tuple(chosen)

    def refuse(self, **only: Any) -> None:
        """Raises UnsupportedError for an option of config.json with another value than the one that is read."""
        for key, value in only.items():
            if self.raw.get(key) not in (None, value):
                raise UnsupportedError(f"{self.name}: {key}={short(self.raw[key])} is not supported: only {value} is")


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a checkpoint is read: its configuration, and where its tensors go.

    ignored: shell patterns of those that carry nothing, or what the target has.
    absolute_ids: a reduced vocabulary's ids are written as they are, not as differences from its own.
    norm_plus_one: norms are written as what is added to 1.
    """

    config: ModelConfig
    names: Mapping[str, Place]
    ignored: tuple[str, ...] = ()
    absolute_ids: bool = False
    norm_plus_one: bool = False


def flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the parts in which some writers put it, one beside the other. What stands outside wins, but for
    the kind of model, which there is the writer's own."""
    inner: dict[str, Any] = {}
    for key in ("transformer_layer_config", "eagle_config", "dflash_config", "model"):
        if isinstance(part := raw.get(key), Mapping):
            inner |= part
    own = {key: value for key, value in raw.items() if key not in inner or key not in ("model_type", "vocab_size")}
    return inner | own
