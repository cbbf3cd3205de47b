"""Tensor names as data: what a file calls a tensor -> where it goes in the parameter dict.

A `{}` stands for the layer's number. The second entry of a place names the part of a merged parameter
("q" of "qkv"); it is empty where one tensor fills the whole parameter. One table a format, shared by all families;
where one calls a tensor otherwise, its entry in `jaxspec.models.families` says so.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping

from jaxspec.models.families import FAMILIES, Place, layer_names


@dataclasses.dataclass(frozen=True)
class Table:
    """One format's names.

    ignored: shell patterns of tensors that are part of something else.
    frequencies: shell patterns of rotary frequencies, which the configuration gives.
    repeats: tensor -> the one that is read in its place, as `tied_by` in the configuration says.
    """

    places: dict[str, Place]
    ignored: tuple[str, ...] = ()
    frequencies: tuple[str, ...] = ()
    repeats: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tied_by: str = "tie_word_embeddings"

    def sources(self, parameter: str) -> dict[str, str]:
        """Part -> tensor name, for one parameter such as "layers.3.qkv"."""
        layer = re.search(r"\d+", parameter)
        pattern = re.sub(r"\d+", "{}", parameter)
        fill = lambda name: name.format(layer.group()) if layer else name
        of = lambda wanted: {part: fill(name) for name, (place, part) in self.places.items() if place == wanted}
        return of(parameter) or of(pattern)  # one layer may be called otherwise than the others

    def unknown(self, names: Iterable[str], used: Iterable[str]) -> list[str]:
        """The names that are neither used nor otherwise known, sorted."""
        spare, known = set(names) - set(used) - self.repeats.keys(), (*self.ignored, *self.frequencies)
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
    """HF, but for what a family calls otherwise."""
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
    ignored=("rope_freqs.weight",),  # which is read into ModelConfig.rope
    frequencies=("blk.*.attn_rot_embd.weight",),
)
