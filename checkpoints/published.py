"""Checkpoints that are published in 8 bits: what `quantization_config` in their config.json means.

Two methods are read: compressed-tensors (https://github.com/vllm-project/compressed-tensors), and fp8 as transformers
and vLLM define it. Both store 8-bit values and their scales, which stay as they are in memory.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from checkpoints.names import Table
from checkpoints.reading import is_regular_file, naming_file, read_config
from checkpoints.tensor_file import text_decoder_name
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.limits import short
from jaxspec.models.parameters import Parameter
from jaxspec.options.quantization import Quantization, form_name

BLOCK = 128  # the only size of blocks that is read
SMALLEST = 32  # smallest number of inputs that share a scale in memory; for fewer, scales take too much memory
E4M3 = "float8_e4m3fn"
KEYS = ("quantization_config", "compression_config")  # keys of config.json; the second is an older name
REMEDY = (
    "read are compressed-tensors and fp8 with symmetric 8-bit weights; take such a checkpoint, a GGUF file, or the "
    "unquantised model with quantization='int8'"
)
# Names for people of methods that are not read, by their quant_method.
OTHERS = {
    "bitsandbytes": "bitsandbytes",
    "modelopt": "ModelOpt",
    "modelopt_fp4": "ModelOpt",
    "modelopt_mixed": "ModelOpt",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "mlx": "MLX",
}
# Storage formats of compressed-tensors that jaxspec reads. In each only weights of 8 bits are read.
FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")


@dataclasses.dataclass(frozen=True)
class Published:
    """The 8-bit forms of a checkpoint's weights.

    method: quant_method of config.json.
    forms: for each form, the names of the modules that have it: a module's name, a pattern after "re:", or "Linear".
    ignored: modules that are not quantised, in the notation of `forms`; for fp8, patterns for beginnings or endings of
      names.
    activations: whether the checkpoint asks for activations or caches in 8 bits, which jaxspec keeps in their dtype.
    """

    method: str
    forms: tuple[tuple[Quantization, tuple[str, ...]], ...]
    ignored: tuple[str, ...] = ()
    activations: bool = False

    @property
    def known(self) -> tuple[Quantization, ...]:
        """The different forms."""
        return tuple(dict.fromkeys(form for form, _ in self.forms))

    @property
    def name(self) -> str:
        """The names of the forms, for messages."""
        return " and ".join(map(form_name, self.known))

    def form(self, module: str) -> Quantization | None:
        """Return the form of a module's weight according to config.json, None if it is not quantised."""
        if any(self.ignores(module, entry) for entry in self.ignored):
            return None
        # The entry that says most about the module decides: its name, then a pattern, then its class.
        order = sorted(
            ((target == "Linear", target.startswith("re:")), i, form)
            for i, (form, targets) in enumerate(self.forms)
            for target in targets
            if target == "Linear" or matches(module, target)
        )
        return order[0][2] if order else None

    def ignores(self, module: str, entry: str) -> bool:
        """Return whether an entry of `ignored` names a module."""
        if self.method == "compressed-tensors":
            return entry == "Linear" or matches(module, entry)
        return module.endswith(entry) or matches(module, rf"re:(?:{entry})(?:(?<=\.)|(?=\.|$))")


def matches(module: str, target: str) -> bool:
    """Return whether a module's name equals `target`, or begins with a match of the pattern after "re:"."""
    pattern = target.removeprefix("re:")
    return module == target if pattern == target else re.match(pattern, module) is not None


def of_folder(folder: Path) -> Published | None:
    """Return the 8-bit forms of a folder's weights, None for a folder without quantised weights. Raises as `parse`."""
    path = folder / "config.json"
    if not is_regular_file(path):
        return None
    with naming_file(path):
        return parse(read_config(path))


def parse(raw: Mapping[str, Any]) -> Published | None:
    """Return the 8-bit forms that the content of a config.json names, None if it names none.

    Raises: UnsupportedError for a method or scheme that is not read; UserError for entries of a wrong type.
    """
    key = next((key for key in KEYS if raw.get(key)), None)
    if key is None:
        if raw.get("quantization"):
            raise refused("the key quantization, which MLX writes,")
        return None
    try:
        return by_method(raw[key])
    except UserError as error:
        raise error.within(f"{key}: ") from None


def by_method(found: Any) -> Published:
    """Return the 8-bit forms that a quantization_config describes. Raises as `parse` does."""
    if not isinstance(found, Mapping):
        raise UserError(f"{short(found)} must be an object")
    method = found.get("quant_method")
    if method == "compressed-tensors":
        return compressed_tensors(found)
    if method == "fp8":
        return fp8(found)
    if method is None and "bits" in found:
        raise refused("no quant_method, as MLX writes it,")
    other = OTHERS.get(method) if isinstance(method, str) else None
    raise refused(f"quant_method={short(method)}" + (f" ({other})" if other else ""))


def refused(what: str) -> UnsupportedError:
    """Return the error for something in quantization_config that is not supported. what: text that names it."""
    return UnsupportedError(f"{what} is not read: {REMEDY}")


def names(found: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return the module names under the first of `keys` that is there. Raises: UserError unless they are a list."""
    value: Any = next((found[key] for key in keys if found.get(key)), [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UserError(f"{keys[0]}={short(value)} must be a list of module names")
    for name in value:
        try:
            re.compile(name.removeprefix("re:"))
        except re.error as error:
            raise UserError(f"{keys[0]}: {short(name)} is no pattern ({error})") from None
    return tuple(map(text_decoder_name, value))


def fp8(found: Mapping[str, Any]) -> Published:
    """Return the forms of a checkpoint with quant_method fp8. Raises as `parse` does."""
    if found.get("fmt", "e4m3") not in ("e4m3", E4M3):
        raise refused(f"fmt={short(found['fmt'])} (only e4m3 is)")
    size = found.get("weight_block_size")
    if size not in (None, [BLOCK, BLOCK]):
        raise refused(f"weight_block_size={short(size)} (only [{BLOCK}, {BLOCK}] is)")
    form = Quantization(E4M3, None, None) if size is None else Quantization(E4M3, BLOCK, BLOCK)
    ignored = names(found, "modules_to_not_convert", "ignored_layers", "modules_not_to_convert")
    return Published("fp8", ((form, ("Linear",)),), ignored, activations=True)


def compressed_tensors(found: Mapping[str, Any]) -> Published:
    """Return the forms of a checkpoint of compressed-tensors. Raises as `parse` does."""
    sparsity = found.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format", "dense") == "dense"):
        raise refused("sparsity_config, for sparse weights,")
    if found.get("transform_config"):
        raise refused("transform_config, for rotated weights,")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UserError(f"config_groups={short(groups)} must be an object with a group of modules")
    forms = []
    activations = bool(found.get("kv_cache_scheme"))
    for name, group in groups.items():
        if isinstance(group, list):
            raise refused(f"the scheme {short(name)}, named without its weights,")
        if not isinstance(group, Mapping) or not isinstance(group.get("weights", {}), Mapping):
            raise UserError(f"{short(name)}={short(group)} must be an object with weights")
        if (layout := group.get("format") or found.get("format", FORMATS[0])) not in FORMATS:
            raise refused(f"format={short(layout)}")
        activations |= bool(group.get("input_activations") or group.get("output_activations"))
        if group.get("weights"):
            forms.append((weights_form(name, group["weights"]), names(group, "targets")))
    if not forms:
        raise refused("config_groups without weights")
    return Published("compressed-tensors", tuple(forms), names(found, "ignore"), activations)


def weights_form(name: str, weights: Mapping[str, Any]) -> Quantization:
    """Return the form of the weights of a group of config_groups. name: the group's name. Raises as `parse` does."""
    where = f"{name}: weights with "
    if weights.get("num_bits", 8) != 8:
        raise refused(f"{where}num_bits={short(weights['num_bits'])}")
    kind = weights.get("type", "int")
    if kind not in ("int", "float"):
        raise refused(f"{where}type={short(kind)}")
    if not weights.get("symmetric", True):
        raise refused(f"{where}symmetric=false, so with zero points,")
    if weights.get("actorder") in ("group", "dynamic", True):
        raise refused(f"{where}actorder={short(weights['actorder'])}")
    dtype = "int8" if kind == "int" else E4M3
    size, block = weights.get("group_size"), weights.get("block_structure")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or default
    if strategy == "tensor":
        return Quantization(dtype, None, None)
    if strategy == "channel":
        return Quantization(dtype, None, 1)
    if strategy == "group" and size == BLOCK:
        return Quantization(dtype, BLOCK, 1)
    if strategy == "block" and block in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        return Quantization(dtype, BLOCK, BLOCK)
    sizes = "".join(f", {key}={short(x)}" for key, x in (("group_size", size), ("block_structure", block)) if x)
    raise refused(f"{where}strategy={short(strategy)}{sizes} (only tensor, channel, groups and blocks of {BLOCK} are)")


def forms(published: Published | None, table: Table, known: Mapping[str, Parameter]) -> dict[str, Quantization]:
    """Return the form in memory of each parameter that stays in 8 bits, according to config.json.

    table: tensor names of the checkpoint.
    known: declarations of the parameters, by name.
    Raises: UserError as `held` does.
    """
    if published is None:
        return {}
    found: dict[str, Quantization] = {}
    for where, parameter in known.items():
        parts = [published.form(name.removesuffix(".weight")) for name in table.sources(where).values()]
        if form := held(where, parameter, parts):
            found[where] = form
    return found


def held(where: str, parameter: Parameter, parts: Collection[Quantization | None]) -> Quantization | None:
    """Return the form in memory of a parameter whose tensors have these forms. None if it is dequantised when loaded.

    Only matrices of products stay in 8 bits, and a merged one only if all its parts have the same dtype. No scale
    changes: if the parts, or the shards of the devices, are no whole blocks, smaller blocks repeat the scales.

    where: name of the parameter.
    parts: forms of the tensors that the parameter is merged from, None for a tensor that is not quantised.
    Raises: UserError if the blocks would become smaller than SMALLEST inputs.
    """
    known = [form for form in parts if form]
    if not parameter.is_quantised or None in parts or len({form.dtype for form in known}) != 1:
        return None
    inputs, outputs = parameter.shard_shape
    sizes = [form.inputs for form in known if form.inputs and form.inputs < parameter.shape[0]]
    rows = [form.outputs for form in known if form.outputs]
    if not sizes:  # all weights of an output share a scale
        single = len(known) == 1 and (not rows or rows[0] >= parameter.shape[1])
        return Quantization(known[0].dtype, None, None if single else 1)
    columns = math.gcd(inputs, *sizes)
    if columns < SMALLEST:
        part = "" if inputs == parameter.shape[0] else f" a device of its {parameter.shape[0]}"
        raise UserError(
            f"{where} is published in blocks of {sizes[0]} inputs, which do not divide the {inputs} inputs{part}: take "
            "another tensor_parallel_size, or the unquantised model with quantization='int8'"
        )
    return Quantization(known[0].dtype, columns, math.gcd(outputs, *rows, *dict(parameter.parts).values()))
