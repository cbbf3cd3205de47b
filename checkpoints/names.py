"""Tables of tensor names: the place in the parameter dict for each tensor name of a file format.

A `{}` represents the layer's number. A place is a pair: the parameter, and the part of a merged parameter ("q" of
"qkv"). The part is "" where one tensor fills the whole parameter. Each format has one table for all families. Names in
which a family differs are in its entry in `jaxspec.models.families`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping

from jaxspec.models.families import FAMILIES, Place, layer_names


@dataclasses.dataclass(frozen=True)
class Table:
    """The tensor names of one file format.

    places: the place of each tensor, by name.
    ignored: shell patterns of tensors that belong to something else.
    frequencies: shell patterns of rotary frequencies. They are not loaded, because the configuration defines them.
    repeats: for a redundant tensor, the name of the tensor that is read instead.
    tied_by: the key of the configuration that makes the tensors in `repeats` redundant.
    """

    places: dict[str, Place]
    ignored: tuple[str, ...] = ()
    frequencies: tuple[str, ...] = ()
    repeats: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tied_by: str = "tie_word_embeddings"

    def sources(self, parameter: str) -> dict[str, str]:
        """Return the tensor name for each part of one parameter, such as "layers.3.qkv"."""
        layer = re.search(r"\d+", parameter)

        def find(wanted: str) -> dict[str, str]:
            names = {part: name for name, (place, part) in self.places.items() if place == wanted}
            return {part: name.format(layer.group()) for part, name in names.items()} if layer else names

        # An entry for this very layer comes before the entry for all layers.
        return find(parameter) or find(re.sub(r"\d+", "{}", parameter))

    def unknown(self, names: Iterable[str], used: Iterable[str]) -> list[str]:
        """Return the names that are neither used nor otherwise known, sorted."""
        spare = set(names) - set(used) - self.repeats.keys()
        known = (*self.ignored, *self.frequencies)
        return sorted(n for n in spare if not any(fnmatch.fnmatchcase(n, pattern) for pattern in known))


HF = Table(
    places={
        "model.embed_tokens.weight": ("embed", ""),
        "model.norm.weight": ("norm", ""),
        "lm_head.weight": ("head", ""),
        **layer_names("model.layers.{}."),
    },
    frequencies=("*.rotary_emb.inv_freq",),
)


def hf(family: str) -> Table:
    """Return HF with the names in which a family differs."""
    return dataclasses.replace(HF, places={**HF.places, **FAMILIES[family].names})


GGUF = Table(
    places={
        "token_embd.weight": ("embed", ""),
        "output_norm.weight": ("norm", ""),
        "output.weight": ("head", ""),
        "blk.{}.attn_norm.weight": ("layers.{}.input_norm", ""),
        "blk.{}.attn_q.weight": ("layers.{}.qkv", "q"),
        "blk.{}.attn_k.weight": ("layers.{}.qkv", "k"),
        "blk.{}.attn_v.weight": ("layers.{}.qkv", "v"),
        "blk.{}.attn_q.bias": ("layers.{}.qkv_bias", "q"),
        "blk.{}.attn_k.bias": ("layers.{}.qkv_bias", "k"),
        "blk.{}.attn_v.bias": ("layers.{}.qkv_bias", "v"),
        "blk.{}.attn_q_norm.weight": ("layers.{}.q_norm", ""),
        "blk.{}.attn_k_norm.weight": ("layers.{}.k_norm", ""),
        "blk.{}.attn_output.weight": ("layers.{}.out", ""),
        "blk.{}.post_attention_norm.weight": ("layers.{}.post_attention_norm", ""),
        "blk.{}.ffn_norm.weight": ("layers.{}.mlp_norm", ""),
        "blk.{}.ffn_gate.weight": ("layers.{}.gate_up", "gate"),
        "blk.{}.ffn_up.weight": ("layers.{}.gate_up", "up"),
        "blk.{}.ffn_down.weight": ("layers.{}.down", ""),
        "blk.{}.post_ffw_norm.weight": ("layers.{}.post_mlp_norm", ""),
    },
    ignored=("rope_freqs.weight",),  # read into ModelConfig.rope
    frequencies=("blk.*.attn_rot_embd.weight",),
)
