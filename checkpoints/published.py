"""Checkpoints that are published in 8 or 4 bits: what `quantization_config` in their config.json means.

These methods are read: compressed-tensors (https://github.com/vllm-project/compressed-tensors), fp8 as transformers
and vLLM define it, AWQ and GPTQ. All store integers or floats of few bits and their scales,
which stay as they are in memory.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.reading import is_regular_file, naming_file, read_config
from checkpoints.tensor_file import text_decoder_name
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.limits import short
from jaxspec.options.quantization import Quantization, form_name

BLOCK = 128  # the only size of blocks that is read
E4M3, FOUR = "float8_e4m3fn", "int4"
GROUPS = (32, 64, 128)  # sizes of groups of 4 bits that are read
KEYS = ("quantization_config", "compression_config")  # keys of config.json; the second is an older name
REMEDY = (
    "read are compressed-tensors and fp8 with symmetric 8-bit weights, and integers of 4 bits of compressed-tensors, "
    "AWQ and GPTQ; take such a checkpoint, a GGUF file, or the unquantised model with quantization='int8'"
)
# Names for people of methods that are not read, by their quant_method.
OTHERS = {
    "bitsandbytes": "bitsandbytes",
    "modelopt": "ModelOpt",
    "modelopt_fp4": "ModelOpt",
    "modelopt_mixed": "ModelOpt",
    "mlx": "MLX",
    "mxfp4": "MXFP4",
}
# Storage formats of compressed-tensors that jaxspec reads. Weights of 4 bits are read in "pack-quantized" alone.
FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")


@dataclasses.dataclass(frozen=True)
class Published:
    """The forms of a checkpoint's quantised weights.

    method: quant_method of config.json.
    forms: for each form, the names of the modules that have it: a module's name, a pattern after "re:", or "Linear".
    ignored: modules that are not quantised, in the notation of `forms`; for fp8, patterns for beginnings or endings of
      names.
    activations: whether the checkpoint asks for activations or caches in 8 bits, which jaxspec keeps in their dtype.
    zeros_as_they_are: whether zero points are stored as they are. GPTQ's first version stores them less by 1.
    """

    method: str
    forms: tuple[tuple[Quantization, tuple[str, ...]], ...]
    ignored: tuple[str, ...] = ()
    activations: bool = False
    zeros_as_they_are: bool = True

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

    def with_scales(self, dtype: str) -> Published:
        """Return the forms with this dtype of the scales of 4-bit weights, which config.json names only for all."""
        forms = (
            (dataclasses.replace(form, scales=dtype) if form.dtype == FOUR else form, targets)
            for form, targets in self.forms
        )
        return dataclasses.replace(self, forms=tuple(forms))

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
        found = by_method(raw[key])
        scales = raw.get("dtype") or raw.get("torch_dtype")
        return found if scales not in ("float32", "float16") else found.with_scales(scales)
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
    if method in ("awq", "gptq"):
        return awq_or_gptq(method, found)
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


def awq_or_gptq(method: str, found: Mapping[str, Any]) -> Published:
    """Return the form of a checkpoint with quant_method awq or gptq. Raises as `parse` does."""
    bits, size = found.get("bits", found.get("w_bit")), found.get("group_size", found.get("q_group_size", 128))
    allowed = {"version": ("gemm", "GEMM"), "checkpoint_format": ("gptq", "gptq_v2"), "format": ("gptq", "gptq_v2")}
    for key in ("version",) if method == "awq" else ("checkpoint_format", "format"):
        if found.get(key) and found[key] not in allowed[key]:
            raise refused(f"quant_method={method!r} with {key}={short(found[key])} (only {allowed[key][0]} is)")
    if bits != 4:
        raise refused(f"quant_method={method!r} with bits={short(bits)} (only 4 is)")
    if type(size) is not int or size not in (-1, *GROUPS):
        raise refused(f"quant_method={method!r} with group_size={short(size)} (only -1, {GROUPS} are)")
    if found.get("dynamic"):
        raise refused(f"quant_method={method!r} with dynamic, other bits for some modules,")
    symmetric = not found.get("zero_point", True) if method == "awq" else found.get("sym", True)
    form = Quantization(FOUR, None if size == -1 else size, 1, zeros=not symmetric, scales="bfloat16")
    layout = found.get("checkpoint_format") or found.get("format")
    ignored = () if found.get("lm_head") else ("lm_head",)
    return Published(
        method,
        ((form, ("Linear",)),),
        (*names(found, "modules_to_not_convert"), *ignored),
        zeros_as_they_are=method == "awq" or layout == "gptq_v2",
    )


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
            form = weights_form(name, group["weights"])
            if form.dtype == FOUR and layout != "pack-quantized":
                raise refused(f"{name}: weights with num_bits=4 in format={short(layout)}")
            forms.append((form, names(group, "targets")))
    if not forms:
        raise refused("config_groups without weights")
    return Published("compressed-tensors", tuple(forms), names(found, "ignore"), activations)


def weights_form(name: str, weights: Mapping[str, Any]) -> Quantization:
    """Return the form of the weights of a group of config_groups. name: the group's name. Raises as `parse` does."""
    where = f"{name}: weights with "
    if weights.get("num_bits") == 4 and weights.get("type", "int") == "int":
        return four_bits(where, weights)
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


def four_bits(where: str, weights: Mapping[str, Any]) -> Quantization:
    """Return the form of 4-bit weights of a group of config_groups. where: text before an error. Raises as `parse`."""
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("channel" if size in (None, -1) else "group")
    if strategy not in ("channel", "group") or (strategy == "group" and not (type(size) is int and size in GROUPS)):
        raise refused(
            f"{where}num_bits=4, strategy={short(strategy)}, group_size={short(size)} (only channel, and groups of "
            f"{GROUPS}, are)"
        )
    inputs = size if strategy == "group" else None
    return Quantization(FOUR, inputs, 1, zeros=not weights.get("symmetric", True), scales="bfloat16")
