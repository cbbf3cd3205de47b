"""Heads beside a target: what their checkpoints have in common, whichever method they are for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.common.errors import MisfitError, UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import Place
from jaxspec.models.limits import number, short

# Where config.json names layers of the target -> 1 where these are the ones whose output is read, which is the input of
# the one after (z-lab's and DeepSeek's), 0 where they are named by their input (SafeAILab's and the speculators
# library's).
TAPS = {"eagle_aux_hidden_state_layer_ids": 0, "aux_hidden_state_layer_ids": 0, "target_layer_ids": 1}


TABLE, HEAD = "embed_tokens.weight", "lm_head.weight"  # what others call the target's, but for a prefix
VERIFIER = ("verifier_norm.weight", "verifier_lm_head.weight")  # the same, as they were in training
# Of jaxspec's own files: the way to rare ids, which stand last among its own.
RARE: dict[str, Place] = {f"{name}.weight": (name, "") for name in ("rare_in", "rare_head")}


@dataclasses.dataclass(frozen=True)
class Found:
    """A head's checkpoint, before its weights are read.

    name: what to call it; raw: its config.json; shapes: of its tensors.
    target: the model that it is to draft for, target_name what to call that.
    parse: the config.json of layers -> their ModelConfig.
    differing: those of its copies of the target's tensors (`Reading.copies`) that are known to be others.
    """

    name: str
    raw: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    target: ModelConfig
    target_name: str
    parse: Callable[[Mapping[str, Any]], ModelConfig]
    differing: frozenset[str] = frozenset()

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

    def copies(self, *names: str) -> dict[str, Place]:
        """Tensors of these names that it has -> the parameter of the target that stands in each one's place."""
        way = "embed" if self.target.tied else "head"
        theirs = {
            TABLE: ("embed", ""),
            HEAD: (way, ""),
            "verifier_norm.weight": ("norm", ""),
            "verifier_lm_head.weight": (way, "d2t" if self.has("d2t") else ""),
        }
        return {full: theirs[name] for name in names for full in (name, self.prefix + name) if full in self.shapes}

    def own(self, name: str) -> bool:
        """Whether it has this tensor, and what stands in its place is known to be another."""
        return not self.differing.isdisjoint((name, self.prefix + name))

    def own_table(self) -> dict[str, Any]:
        """The fields of its table, where it has one of the target's shape that is another: it is read as the target's
        would be."""
        return {"has_table": True, "embed_scale": self.target.embed_scale} if self.own(TABLE) else {}

    def layers(self) -> dict[str, Any]:
        """The fields of its layers' ModelConfig, read from config.json as of a Llama. It reads and proposes the
        target's ids, and its context is the target's: what a head's own config says of it is seldom meant."""
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            self.needed(key)
        self.fits("vocabulary", self.vocab_size, self.target.vocab_size)
        ids = {"vocab_size": self.target.vocab_size, "max_position_embeddings": self.target.max_model_len}
        # Where config.json says nothing, Llama's own defaults are meant, whatever the target has.
        # That attention has biases is read below, not with the options of a model, where all four projections have one.
        own = {**self.raw, **ids, "model_type": "llama", "tie_word_embeddings": False, "attention_bias": False}
        raw = {"rope_theta": 1e4, **own}
        fields = vars(self.parse(raw))
        there = lambda end: any(name.endswith(end) for name in self.shapes)
        biased = self.flag("attention_bias", default=False) or there("self_attn.q_proj.bias")
        normed = there("self_attn.q_norm.weight")
        rare = {"rare_vocab_size": "rare_head.weight", "rare_width": "rare_in.weight"}
        rows = {field: self.shapes.get(self.prefix + name, (0,))[0] for field, name in rare.items()}
        ends = {"bos_id": self.target.bos_id, "eos_ids": self.target.eos_ids}
        return fields | ends | {"qkv_bias": biased, "qk_norm": normed} | rows

    @property
    def vocab_size(self) -> int:
        """Of the target that it was made for: rows of its copy of the table, else what config.json says."""
        rows = [shape[0] for name, shape in self.shapes.items() if name.endswith(("t2d", "embed_tokens.weight"))]
        return rows[0] if rows else self.whole("vocab_size", self.target.vocab_size)

    def fits(self, what: str, own: int, targets: int) -> None:
        """Raises UserError where the head was made for another target."""
        if own != targets:
            raise MisfitError(
                f"the draft {self.name!r} was made for a target of {what} {own}, {self.target_name!r} has {targets}: "
                "give it the target that it was trained for"
            )

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.name}: {key}={short(value)} must be true or false")
        return value

    def needed(self, key: str) -> Any:
        if self.raw.get(key) is None:
            raise UserError(f"{self.name}: config.json is missing or lacks {key}")
        return self.raw[key]

    def whole(self, key: str, default: Any = None, kind: str = "vocab_size") -> Any:
        """A number of config.json, which must be there unless a default is given; kind: of LIMITS."""
        value = self.needed(key) if default is None else self.raw.get(key, default)
        return number(kind, value, key)

    def taps(self, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Layers of the target whose input the head reads; L is what goes into the last norm. They must be named,
        unless a default is given."""
        key = next((key for key in TAPS if self.raw.get(key) is not None), None)
        if key is None and default is None:
            raise UserError(f"{self.name}: config.json names no layers of the target, in none of {', '.join(TAPS)}")
        said: Any = self.raw[key] if key else default
        most, shift = self.target.num_layers, TAPS[key] if key else 0
        ints = isinstance(said, list | tuple) and all(isinstance(i, int) for i in said)
        chosen = tuple(i + shift for i in said) if ints else ()
        if not chosen or not all(0 <= i <= most for i in chosen):
            raise MisfitError(
                f"the draft {self.name!r} reads layers {key or 'by default'}={short(said)}, {self.target_name!r} has "
                f"{most}: give it the target that it was trained for"
            )
        return chosen

    def refuse(self, **only: Any) -> None:
        """Raises UnsupportedError for an option of config.json with another value than the one that is read."""
        for key, value in only.items():
            if self.raw.get(key) not in (None, value):
                raise UnsupportedError(f"{self.name}: {key}={short(self.raw[key])} is not supported: only {value} is")


def flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the parts in which some writers put it, one beside the other. What stands outside wins, but for
    the kind of model, which there is the writer's own."""
    inner: dict[str, Any] = {}
    for key in ("transformer_layer_config", "eagle_config", "dflash_config", "model"):
        if isinstance(part := raw.get(key), Mapping):
            inner |= part
    own = {key: value for key, value in raw.items() if key not in inner or key not in ("model_type", "vocab_size")}
    return inner | own
