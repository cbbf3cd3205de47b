"""Tables of tensor names: which model parameter each tensor of a file format fills.

The text "{}" in a name represents the layer's number. A place is a pair: the name of the parameter, and the part of a
merged parameter (such as "q" of "qkv"). The part is "" if the tensor fills the whole parameter, and "q+k+v" if the
tensor holds the rows of q, then those of k and of v. Each file format has one table for all model families. Names in
which a family differs are in its entry in `jaxspec.models.families`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping

from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES, Place, layer_names


class Again(str):
    """The name of a tensor that fills more than one part of a parameter, each with a copy of the whole tensor.

    For example a matrix of keys that is the matrix of values, too. A plain string that repeats names a tensor in which
    the parts are stacked.
    """

    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Table:
    """The tensor names of one file format, or of one drafting head.

    places: the parameter and the part of it that each tensor fills, by the tensor's name.
    ignored: shell patterns of tensors that may be in a file but are not parameters of the model.
    frequencies: shell patterns of tensors with rotary frequencies, which are not loaded, because the configuration
      defines these.
    repeats: for each redundant tensor, the name of the tensor that is read instead.
    further: the tensor that also fills a part of a parameter, by that part's place. Its entry in `places` is for
      another part.
    tied_by: the key of config.json that makes the tensors in `repeats` redundant if it is true.
    """

    places: dict[str, Place]
    ignored: tuple[str, ...] = ()
    frequencies: tuple[str, ...] = ()
    repeats: Mapping[str, str] = dataclasses.field(default_factory=dict)
    further: Mapping[Place, str] = dataclasses.field(default_factory=dict)
    tied_by: str = "tie_word_embeddings"

    def sources(self, parameter: str) -> dict[str, str]:
        """Return the tensor name for each part of one parameter. parameter: its name, such as "layers.3.qkv"."""
        layer = re.search(r"\d+", parameter)

        def find(wanted: str) -> dict[str, str]:
            found = [(name, parts) for name, (place, parts) in self.places.items() if place == wanted]
            names = {part: name for name, parts in found for part in parts.split("+")}
            names = {part: name.format(layer.group()) for part, name in names.items()} if layer else names
            again = {part: Again(name) for (place, part), name in self.further.items() if place == wanted}
            return names | again

        # An entry of the table for this layer alone takes precedence over an entry for all layers.
        return find(parameter) or find(re.sub(r"\d+", "{}", parameter))

    def unknown(self, names: Iterable[str], used: Iterable[str]) -> list[str]:
        """Return the tensor names that the table does not account for, sorted.

        names: all tensor names of a file.
        used: names of the tensors that were read.
        """
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
    """Return the table of Hugging Face's tensor names for a model family."""
    return dataclasses.replace(HF, places={**HF.places, **FAMILIES[family].names})


def hf_of(config: ModelConfig) -> Table:
    """Return the table of Hugging Face's tensor names for a model, some of whose layers may differ from the others."""
    attention = "model.layers.{}.self_attn."
    return by_layer(hf(config.family), config, attention + "{}_proj.weight", attention + "k_norm.weight")


def by_layer(table: Table, config: ModelConfig, matrix: str, norm: str) -> Table:
    """Return a table with entries of their own for the layers that differ in their queries, keys and values.

    A layer that reads another layer's keys and values has only a matrix of queries. Its checkpoint may hold matrices of
    keys and values nevertheless, which are not used.

    matrix: name of the matrix of queries, keys or values; its placeholders are the layer's number and one of "qkv".
    norm: name of the norm of keys.
    """
    places, further, ignored = dict(table.places), {}, list(table.ignored)
    for i, layer in enumerate(config.layers):
        names = {part: matrix.format(i, part) for part in "qkv"}
        if layer.shares is not None:
            places[names["q"]] = (f"layers.{i}.q", "")
            ignored += [names["k"], names["v"], norm.format(i)]
        elif layer.value_is_key:
            places |= {names[part]: (f"layers.{i}.qkv", part) for part in "qk"}
            further[f"layers.{i}.qkv", "v"] = names["k"]
    return dataclasses.replace(table, places=places, further=further, ignored=tuple(ignored))


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
    # Tensors that become part of ModelConfig.rope. They are not parameters.
    ignored=("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
    frequencies=("blk.*.attn_rot_embd.weight",),
)


def gguf(family: str) -> Table:
    """Return the table of GGUF's tensor names for a model family."""
    files = FAMILIES[family].gguf
    if files is None:
        return GGUF
    return dataclasses.replace(GGUF, places={**GGUF.places, **files.names}, ignored=GGUF.ignored + files.ignored)


def gguf_of(config: ModelConfig) -> Table:
    """Return the table of GGUF's tensor names for a model, some of whose layers may differ from the others."""
    return by_layer(gguf(config.family), config, "blk.{}.attn_{}.weight", "blk.{}.attn_k_norm.weight")
