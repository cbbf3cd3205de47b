"""Checkpoints of drafting heads: the parts that are the same for all drafting methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.common.errors import MisfitError, UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import Place
from jaxspec.models.limits import number, short

# Keys of config.json that list the target's layers that a head reads, and the offset from the listed layers to the
# layers whose input is read. SafeAILab and the speculators library list these layers themselves: 0. z-lab and DeepSeek
# list the layers whose output is read, which is the next layer's input: 1.
TAPS = {"eagle_aux_hidden_state_layer_ids": 0, "aux_hidden_state_layer_ids": 0, "target_layer_ids": 1}

TABLE, HEAD = "embed_tokens.weight", "lm_head.weight"  # usual tensor names of embedding table and output head
# Tensor names of copies of the target's last norm and output head, which only the head's training used.
VERIFIER = ("verifier_norm.weight", "verifier_lm_head.weight")
# Tensors that only checkpoints written by jaxspec have: the low-rank output head for the last token ids of the drafting
# head's vocabulary, which are rare.
RARE: dict[str, Place] = {f"{name}.weight": (name, "") for name in ("rare_in", "rare_head")}


@dataclasses.dataclass(frozen=True)
class HeadCheckpoint:
    """A drafting head's checkpoint, before its weights are read.

    name: name of the checkpoint in messages.
    raw: content of the checkpoint's config.json.
    shapes: shapes of the checkpoint's tensors, by name.
    target: configuration of the model that the head drafts for.
    target_name: name of the target in messages.
    parse: function that returns the ModelConfig of a decoder's config.json.
    differing: names of tensors that should be copies of the target's (`Reading.copies`) but are known to differ.
    """

    name: str
    raw: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    target: ModelConfig
    target_name: str
    parse: Callable[[Mapping[str, Any]], ModelConfig]
    differing: frozenset[str] = frozenset()

    def has(self, *starts: str) -> bool:
        """Return whether some tensor's name, without the writer's prefix, begins with one of `starts`."""
        return any(name.removeprefix(self.prefix).startswith(starts) for name in self.shapes)

    @property
    def prefix(self) -> str:
        """The prefix "model." that some writers put before most tensor names; "" if this checkpoint has none."""
        return "model." if any(name.startswith("model.") for name in self.shapes) else ""

    def named(self, names: Mapping[str, Place]) -> dict[str, Place]:
        """Return `names` with the writer's prefix added to each name that the checkpoint lacks without it.

        names: the parameter, as (name, part), that each tensor fills, by the tensor's name.
        """
        return {name if name in self.shapes else self.prefix + name: place for name, place in names.items()}

    def copies(self, *names: str) -> dict[str, Place]:
        """Return the target's parameter that replaces each of these tensors, for those that the checkpoint has.

        names: tensor names without the writer's prefix. The result's keys include the prefix.
        """
        head = "embed" if self.target.tied else "head"
        replacements = {
            TABLE: ("embed", ""),
            HEAD: (head, ""),
            "verifier_norm.weight": ("norm", ""),
            "verifier_lm_head.weight": (head, "d2t" if self.has("d2t") else ""),
        }
        found = {}
        for name in names:
            for full in (name, self.prefix + name):
                if full in self.shapes:
                    found[full] = replacements[name]
        return found

    def own(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of this name that is known to differ from the target's."""
        return not self.differing.isdisjoint((name, self.prefix + name))

    def own_table(self) -> dict[str, Any]:
        """Return the configuration fields for the head's own embedding table; {} if it has none.

        A table counts as the head's own if it has the target's shape but differs from the target's table. Embeddings of
        such a table are multiplied by the target's scale.
        """
        return {"has_table": True, "embed_scale": self.target.embed_scale} if self.own(TABLE) else {}

    def layers(self) -> dict[str, Any]:
        """Return the ModelConfig fields of the head's layers, read from config.json as if it were a Llama's.

        The vocabulary and the context length are the target's. A head's own config.json is seldom right about these.

        Raises:
          UserError: config.json lacks a size.
          MisfitError: the head was made for another vocabulary size than the target's.
        """
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            self.needed(key)
        self.fits("vocabulary", self.vocab_size, self.target.vocab_size)
        ids = {"vocab_size": self.target.vocab_size, "max_position_embeddings": self.target.max_model_len}
        # If config.json lacks a key, Llama's own default holds, whatever value the target has.
        # attention_bias is read below. Passed on here, it would mean biases of all four attention projections. A head
        # can have biases of q, k and v only.
        own = {**self.raw, **ids, "model_type": "llama", "tie_word_embeddings": False, "attention_bias": False}
        raw = {"rope_theta": 1e4, **own}
        fields = vars(self.parse(raw))
        biased = self.flag("attention_bias", default=False) or self.has_end("self_attn.q_proj.bias")
        normed = self.has_end("self_attn.q_norm.weight")
        rare = {"rare_vocab_size": "rare_head.weight", "rare_width": "rare_in.weight"}
        rows = {field: self.shapes.get(self.prefix + name, (0,))[0] for field, name in rare.items()}
        ends = {"bos_id": self.target.bos_id, "eos_ids": self.target.eos_ids}
        return fields | ends | {"qkv_bias": biased, "qk_norm": normed} | rows

    def has_end(self, end: str) -> bool:
        """Return whether some tensor's name ends with `end`."""
        return any(name.endswith(end) for name in self.shapes)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the target that the head was made for.

        This is the number of rows of the head's copy of the embedding table, or of t2d (which has an entry for each of
        the target's ids). Without these tensors it is the size in config.json, else the given target's.
        """
        rows = [shape[0] for name, shape in self.shapes.items() if name.endswith(("t2d", "embed_tokens.weight"))]
        return rows[0] if rows else self.whole("vocab_size", self.target.vocab_size)

    def fits(self, what: str, own: int, targets: int) -> None:
        """Raise MisfitError if a size shows that the head was made for another target.

        what: name of the size in the message.
        own: the size according to the head's checkpoint.
        targets: the size of the given target.
        """
        if own != targets:
            raise MisfitError(
                f"the draft {self.name!r} was made for a target of {what} {own}, {self.target_name!r} has {targets}: "
                "give it the target that it was trained for"
            )

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean that config.json has for a key, or the default. Raise UserError for any other value."""
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.name}: {key}={short(value)} must be true or false")
        return value

    def needed(self, key: str) -> Any:
        """Return the value that config.json has for a key. Raise UserError if it is missing or null."""
        if self.raw.get(key) is None:
            raise UserError(f"{self.name}: config.json is missing or lacks {key}")
        return self.raw[key]

    def whole(self, key: str, default: Any = None, kind: str = "vocab_size") -> Any:
        """Return the number that config.json has for a key, or the default. Raise UserError if both are missing.

        kind: a key of `jaxspec.models.limits.LIMITS`, whose limits the number must keep.
        """
        value = self.needed(key) if default is None else self.raw.get(key, default)
        return number(kind, value, key)

    def taps(self, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Return the indices of the target's layers whose inputs the head reads.

        Index L, the number of layers, means the input of the target's last norm.

        Raises:
          UserError: config.json lists no layers, and there is no default.
          MisfitError: the target does not have these layers.
        """
        key = next((key for key in TAPS if self.raw.get(key) is not None), None)
        if key is None and default is None:
            raise UserError(
                f"{self.name}: config.json names no layers of the target: one of {', '.join(TAPS)} is needed"
            )
        listed: Any = self.raw[key] if key else default
        most = self.target.num_layers
        shift = TAPS[key] if key else 0
        ints = isinstance(listed, list | tuple) and all(isinstance(i, int) for i in listed)
        chosen = tuple(i + shift for i in listed) if ints else ()
        if not chosen or not all(0 <= i <= most for i in chosen):
            raise MisfitError(
                f"the draft {self.name!r} reads layers {key or 'by default'}={short(listed)}, {self.target_name!r} has "
                f"{most}: give it the target that it was trained for"
            )
        return chosen

    def refuse(self, **only: Any) -> None:
        """Raise UnsupportedError if config.json has another value for a key than the only supported one.

        only: the supported value of each key.
        """
        for key, value in only.items():
            if self.raw.get(key) not in (None, value):
                raise UnsupportedError(f"{self.name}: {key}={short(self.raw[key])} is not supported: only {value} is")


def flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the objects that some writers nest in it moved to the top level.

    A key of the top level wins over the same key of a nested object. For model_type and vocab_size the nested value
    wins: at the top level of such a file they describe the writer's own class.
    """
    inner: dict[str, Any] = {}
    for key in ("transformer_layer_config", "eagle_config", "dflash_config", "model"):
        part = raw.get(key)
        if isinstance(part, Mapping):
            inner |= part
    own = {key: value for key, value in raw.items() if key not in inner or key not in ("model_type", "vocab_size")}
    return inner | own
