"""Conversion of checkpoints of models and of drafting heads.

A model becomes a self-contained orbax folder (weights, configuration and tokenizer), or a folder of safetensors in 8
or 4 bits. A head becomes a folder of safetensors, in the format that it already has or in that of the speculators
library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import checkpoints
from checkpoints import eight_bits, head_folders, orbax, published_writing, safetensors, speculators
from checkpoints.assemble import check
from checkpoints.hf_config import rope_parameters, text_part
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.drafters import methods
from jaxspec.drafters.head_checkpoint import flattened
from jaxspec.loading.drafts import with_compared_copies
from jaxspec.loading.quantised import check_same_form, keeper, quantiser
from jaxspec.loading.resolved import resolved, resolved_draft
from jaxspec.models.decoder import parameters
from jaxspec.models.limits import short
from jaxspec.models.parameters import Parameter
from jaxspec.options.quantization import BLOCKS, FORMS, WITH_HEAD, check_quantization
from pallas_kernels.weights import AnyWeight
from pallas_kernels.weights.grouped import Grouped
from pallas_kernels.weights.scaled import Scaled


def convert(
    src: str,
    dst: str | Path,
    *,
    to: str = "jaxspec",
    target: str | None = None,
    dtype: str | None = None,
    weight_bits: int | None = None,
    quantization: str | None = None,
    progress: bool = True,
) -> Path:
    """Convert the checkpoint of a model or of a drafting head, and return the new folder.

    src: hub id, folder or .gguf file of the checkpoint.
    dst: the new folder.
    to: "jaxspec" writes any model as a self-contained orbax folder, and a head in safetensors, which need no torch;
      "safetensors" writes a Hugging Face model with `quantization` as other libraries read it; "speculators" writes a
      head in the format of the speculators library.
    target: the target of a head, as a hub id or a folder of safetensors; only "speculators" needs it.
    dtype: dtype of the weights (a model's norms stay float32); None keeps the stored dtype, or takes bfloat16 if the
      stored weights are quantised.
    weight_bits: 8 rounds matrices to 8-bit integers, with a power of two as the scale of every 32 integers. This halves
      a file of bfloat16 weights. Tokens of a draft that was so converted may be accepted a little less often; the
      target's output does not depend on this. None does not round.
    quantization: name in `jaxspec.options.quantization.FORMS` of the form of a model's matrices, which is also their
      form when the new folder is loaded; None keeps their form.
    Raises: FileExistsError if `dst` exists and is not empty; UserError for a format that is unknown or needs a target;
      UnsupportedError, naming the method or the option, for a head that the format cannot represent; other errors as
      loading does.
    """
    if to not in FORMATS:
        raise UserError(f"to={short(to)} is unknown: use one of {', '.join(FORMATS)}")
    if weight_bits not in (None, 8):
        raise UserError(f"weight_bits={short(weight_bits)}: give 8, or nothing for the bits of dtype")
    check_quantization("quantization", quantization)
    if quantization and quantization in FORMS and FORMS[quantization].activations:
        raise UserError(
            f"quantization={quantization!r} rounds activations, too, which happens while the model runs: convert to "
            f"{quantization.removesuffix('_dynamic')!r}, and load that with quantization={quantization!r}"
        )
    if quantization and quantization.endswith(WITH_HEAD):
        raise UserError(
            f"quantization={quantization!r}: the output head is quantised while it is loaded: convert to "
            f"{quantization.removesuffix(WITH_HEAD).removesuffix('_dynamic')!r}, and load that with this quantization"
        )
    if quantization == BLOCKS:
        raise UserError(f"quantization={quantization!r}: blocks of a GGUF file are not written: load the file itself")
    if weight_bits and quantization:
        raise UserError(f"weight_bits={weight_bits} and quantization={quantization!r} exclude each other: give one")
    if quantization and to == "speculators":
        raise UserError(f"quantization={quantization!r}: to='speculators' writes no quantised heads: leave it out")
    if to != "speculators" and target is not None:
        raise UserError(f"target={short(target)} is of to='speculators', the format {to!r} names none: leave it out")
    dst = Path(dst).expanduser().absolute()
    orbax.check_free(dst)  # checked before anything is downloaded
    FORMATS[to](src, dst, Options(target, dtype, weight_bits, quantization, progress))
    return dst


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `convert`, with the same names and meanings."""

    target: str | None
    dtype: str | None
    weight_bits: int | None
    quantization: str | None
    progress: bool


def as_jaxspec(src: str, dst: Path, options: Options) -> None:
    """Write a model as an orbax folder, or a head in safetensors. Arguments and errors are those of `convert`."""
    source = checkpoints.resolve(src)
    if method_of(source) != "draft_model":
        check_no_head(source, options)
        head_folders.convert(source.path, dst, options.dtype, options.weight_bits)
        return
    model = resolved(source)
    config = model.config
    fingerprint = checkpoints.load_fingerprint(source)
    tokenizer = None if fingerprint else checkpoints.load_tokenizer(source)  # such a draft has no tokenizer
    known = parameters(config, options.dtype or checkpoints.stored_dtype(source))
    here = SingleDeviceSharding(host_device())
    own = {name: dataclasses.replace(p, sharding=here) for name, p in known.items() if not p.from_target}
    stored = checkpoints.stored_quantization(source)
    if stored and options.weight_bits:
        raise UserError(
            f"weight_bits={options.weight_bits}: {model.name} is already quantised ({stored.name}): leave it out"
        )
    keep = keeper(model, options.quantization)
    params = checkpoints.load_params(source, config, own, keep=keep, progress=options.progress)
    for where, x in params.items():
        check_scales(model.name, where, x)
    if any(isinstance(x, Grouped) and x.order is not None for x in params.values()):
        raise UnsupportedError(
            f"{model.name} has inputs in another order (act order), which to='jaxspec' does not write: load the model "
            "itself, or take one without desc_act or actorder"
        )
    if options.weight_bits is not None:
        params = {name: jax.device_put(rounded(name, known[name], x), here) for name, x in params.items()}
    if tokenizer is not None:
        config = dataclasses.replace(config, eos_ids=checkpoints.load_stop_ids(source, tokenizer, config))
    forms = stored.known if stored else [FORMS[options.quantization]] if options.quantization else []
    checkpoints.save(dst, params, config, tokenizer, fingerprint=fingerprint, forms=forms)


def check_no_head(source: checkpoints.Source, options: Options) -> None:
    """Raise UserError if a drafting head is to be quantised."""
    if options.quantization is not None:
        raise UserError(
            f"quantization={options.quantization!r}: {source.name} is a drafting head, which is quantised when it is "
            "loaded: give quantization in speculative_config, or weight_bits=8 here"
        )


def check_scales(model: str, name: str, weight: AnyWeight) -> None:
    """Raise UserError if scales of a quantised weight are not finite, as they are for weights that are not finite."""
    scales = weight.scale if isinstance(weight, Scaled | Grouped) else ()
    if not all(np.isfinite(scale).all() for scale in jax.tree.leaves(scales)):
        raise UserError(
            f"{model}: {name} holds numbers that are not finite, which quantised weights do not: fetch the model again"
        )


def as_safetensors(src: str, dst: Path, options: Options) -> None:
    """Write a model in safetensors, with its matrices in 8 or 4 bits. Arguments and errors are those of `convert`."""
    source = checkpoints.resolve(src)
    name = options.quantization
    if name is None or options.weight_bits is not None:
        raise UserError("to='safetensors' writes quantised models: give quantization, such as 'int8'")
    if source.kind != "hf":
        raise UserError(
            f"to='safetensors' needs a model with a config.json of Hugging Face, {source.name} is of format "
            f"{source.kind!r}: use to='jaxspec'"
        )
    if method_of(source) != "draft_model":
        check_no_head(source, options)
    check_same_form(source.name, checkpoints.stored_quantization(source), name)
    config = checkpoints.load_config(source)
    form, quantise = FORMS[name], quantiser(name)
    known, shards = parameters(config), safetensors.Shards(source.path)
    if shards.published:
        raise UserError(f"{source.name} is already quantised in safetensors ({shards.published.name}): copy it")
    table = safetensors.table_of(config, shards)
    check(config, known, table, shards)
    places = {tensor: where for where in known for tensor in table.sources(where).values()}
    tensors: dict[str, np.ndarray] = {}
    ignored = []
    for tensor, shape in shards.shapes().items():
        x = head_folders.whole(shards, tensor)
        where = places.get(tensor)
        if where is not None and known[where].is_quantised:
            turned: Any = shape[::-1]
            with jax.default_device(host_device()):
                weight = quantise(tensor, dataclasses.replace(known[where], shape=turned), jnp.asarray(x).T)
            check_scales(source.name, tensor, weight)
            tensors |= published_writing.stored(tensor, weight, form)
            continue
        if len(shape) == 2 and tensor.endswith(".weight") and not (where and known[where].kind == "table"):
            ignored.append(tensor.removesuffix(".weight"))
        tensors[tensor] = x.astype(jnp.dtype(options.dtype)) if options.dtype and x.dtype.kind not in "iub" else x
    if config.tied:  # transformers has a module lm_head also where the file has no such tensor
        ignored.append("lm_head")
    raw = {
        **text_part(head_folders.contents(source.path)[0]),
        "quantization_config": published_writing.quantization_config(form, ignored),
    }
    head_folders.write(dst, tensors, source.path, config=raw)


def rounded(name: str, parameter: Parameter, x: jax.Array) -> Any:
    """Round a matrix or table to 8 bits along the axis that products sum over. Return other parameters unchanged."""
    if parameter.kind not in ("matrix", "table"):
        return x
    return eight_bits.rounded(np.asarray(x), axis=0 if parameter.kind == "matrix" else -1, name=name)


def as_speculators(src: str, dst: Path, options: Options) -> None:
    """Write a head in the format of the speculators library. Arguments and errors are those of `convert`."""
    target = options.target
    if options.weight_bits is not None:
        raise UserError(
            f"weight_bits={options.weight_bits} is of to='jaxspec', 'speculators' keeps all bits: leave it out"
        )
    if target is None:
        raise UserError("to='speculators' needs the head's target, which its config.json names: give target")
    source = checkpoints.resolve(src)
    own = ", ".join(speculators.METHODS)
    method = method_of(source)
    if method == "draft_model":
        raise UserError(f"{source.name} is a model of its own, speculators has heads only: convert one of {own}")
    if method not in speculators.METHODS:
        raise UnsupportedError(
            f"{source.name} is a head of method {method!r}, speculators has {own}: convert one of these"
        )
    beside = checkpoints.resolve(target)
    if beside.kind != "hf":
        raise UserError(
            f"target={short(target)} is of format {beside.kind!r}, which speculators does not read: give its hub id, "
            "or a folder with its config.json and safetensors"
        )
    found = resolved(beside)
    of_target = found.config
    known = parameters(of_target)

    def target_parameter(where: str) -> jax.Array:
        return head_folders.read_target_parameter(beside.path, of_target, known[where], where)

    reading: Any = with_compared_copies(resolved_draft(source, found), target_parameter).reading
    speculators.check(source.name, reading.config, of_target)
    tensors = speculators.tensors(source, reading, parameters(reading.config), beside, of_target)
    raw = head_folders.contents(source.path)[0]
    shapes = {name: x.shape for name, x in tensors.items()}
    before = raw.get("speculators_config") or {}
    config = speculators.config(reading.config, shapes, beside, rope(flattened(raw)), before)
    head_folders.write(dst, tensors, source.path, options.dtype, config)


# Functions that write the formats, by the formats' names.
FORMATS = {"jaxspec": as_jaxspec, "safetensors": as_safetensors, "speculators": as_speculators}


def method_of(source: checkpoints.Source) -> str:
    """Return the drafting method of a head's checkpoint; "draft_model" for a model, even if it contains a head."""
    if source.kind != "hf":
        return "draft_model"
    return methods.of_checkpoint(*head_folders.contents(source.path))


def rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding's options of a head's config.json, under the names of older transformers versions.

    All versions of the transformers library read those names (rope_theta, rope_scaling). Options that are missing get
    Llama's defaults.
    """
    scaling = dict(rope_parameters(raw))
    theta = scaling.pop("rope_theta", 1e4)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {"rope_theta": theta} if kind == "default" else {"rope_theta": theta, "rope_scaling": scaling}


def host_device() -> jax.Device:
    """Return a CPU device if there is one, because conversion needs no accelerator; else any device of this process."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]
