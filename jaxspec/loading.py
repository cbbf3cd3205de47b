"""From a model's name to what computes: the platform, its dtype, the weights, and whether a draft fits its target."""

from __future__ import annotations

import functools
import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import checkpoints
from checkpoints import heads
from checkpoints.reading import told
from checkpoints.sources import cache_folder
from jaxspec.config import EngineConfig, SpeculativeConfig
from jaxspec.drafters import methods
from jaxspec.drafters.heads import Found, Reading, flattened
from jaxspec.engine.setup import Model
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import abstract_params, parameters, weight_bytes
from jaxspec.parallel.placement import Placement, check_divides, divisors, make_placement
from jaxspec.platforms import facts
from jaxspec.progress import say
from pallas_kernels.device import Device, here

logger = logging.getLogger(__name__)


def compute_dtype(name: str, device: Device) -> Any:
    """ "auto" is the platform's own, and float32 on a GPU that has no bfloat16: float16, which it has, ends at 65,504,
    and the activations of some models do not (Gemma's, Qwen's)."""
    auto = "float32" if device.lacks_bfloat16 else facts(device.platform).dtype
    return jnp.dtype(auto if name == "auto" else name)


def load(source: Any, dtype: Any, placement: Any, target: Model | None = None) -> Model:
    """target: of the draft that is loaded, which may read ids in its table. Raises UserError where that does not fit,
    else as loading does."""
    config = checkpoints.load_config(source)
    check_divides(config, placement.degree, of_draft=target is not None)
    config = config.copied_for(placement.degree)
    abstract, theirs = abstract_params(config, dtype, placement), {}
    if borrowed := [name for name, p in abstract.items() if p.borrowed]:
        if target is None:
            raise UserError(
                f"{source.name} is a draft, which reads ids in its target's table: give its target as the model, and "
                "this as the draft"
            )
        check_table(target.config, source.name, config)
        own = None if target.dtype == dtype else dtype  # one that lies in bfloat16 on a CPU may stay so
        as_mine = lambda name: jax.device_put(jnp.asarray(target.params[name], own), abstract[name].sharding)
        theirs = {name: as_mine(name) for name in borrowed}  # no copy where they agree
        abstract = {name: p for name, p in abstract.items() if name not in theirs}
    params = checkpoints.load_params(source, config, abstract)
    if target is None:
        check_finite(source.name, {name: params[name] for name, p in abstract.items() if p.head})
    return Model(config, params | theirs)


def check_finite(name: str, weights: dict[str, jax.Array]) -> None:
    """Raises UserError where a logit would be no number: whoever is told the largest only would not see it."""
    for where, known in jax.device_get(finite(weights)).items():
        if not known:
            raise UserError(
                f"{name}: {where}, of which all logits are made, holds numbers that are not finite: fetch the model "
                "again, or take another dtype"
            )


@jax.jit
def finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.isfinite(x).all() for name, x in arrays.items()}


def draft_config(
    source: checkpoints.Source, target: ModelConfig, target_name: str, method: str | None = None
) -> ModelConfig:
    """Of the draft that `load_draft` would load, without its weights."""
    reading = read_draft(source, target, target_name, method)
    return checkpoints.load_config(source) if reading is None else reading.config


def draft_source(source: checkpoints.Source, speculative: SpeculativeConfig) -> checkpoints.Source:
    """source: the target's, within which the draft may be."""
    if not speculative.model:
        return source
    return checkpoints.resolve(speculative.model, revision=speculative.revision)


def placed(source: checkpoints.Source, config: EngineConfig, speculative: SpeculativeConfig | None) -> Placement:
    """Where a target of this source lies, and by its axes the draft, as was asked for or is expected to be fastest."""
    degree, asked = config.tensor_parallel_size, speculative.draft_tensor_parallel_size if speculative else None
    if speculative is None or not speculative.has_parameters or not (degree > 1 or asked):
        return make_placement(degree)
    target, device = checkpoints.load_config(source), here()
    draft = draft_config(draft_source(source, speculative), target, source.name, speculative.method)
    dtype = compute_dtype(speculative.dtype or config.dtype, device)
    size = asked or draft_degree(draft, degree, dtype, device)
    logger.info("the draft is cut over %d of %d devices", size, degree)
    return make_placement(degree, draft_size=size)


def draft_degree(config: ModelConfig, degree: int, dtype: Any, device: Device) -> int:
    """Into how many parts a draft beside a target of this degree is best cut: what a part saves of reading weights
    against the two sums a layer that it costs."""
    known, able = facts(device.platform), divisors(math.gcd(degree, *config.cut_sizes.values()))
    shapes: Any = parameters(config, dtype)
    read = weight_bytes(config, shapes)
    sums = 2 * config.num_layers * known.all_reduce
    return min(able, key=lambda d: read / d / known.bandwidth + (sums if d > 1 else 0.0))


def load_draft(
    source: checkpoints.Source, dtype: Any, placement: Any, target: Model, target_name: str, method: str | None = None
) -> Model:
    """A draft for this target, of whichever method it is; method: the one it should be, or None.

    Raises: UserError where it is for another method or does not fit, else as loading does.
    """
    reading = read_draft(source, target.config, target_name, method)
    if reading is None:
        return load(source, dtype, placement, target)
    if reading.remark:
        logger.warning("%s", reading.remark)
    check_divides(reading.config, placement.degree, of_draft=True)
    abstract = abstract_params(reading.config, dtype, placement)
    return Model(reading.config, heads.load(source.path, reading, abstract))


def read_draft(
    source: checkpoints.Source, target: ModelConfig, target_name: str, method: str | None = None
) -> Reading | None:
    """How a head beside this target is read; None for a draft that is a model of its own. Raises as `load_draft`."""
    raw, shapes = heads.contents(source.path) if source.kind == "hf" else ({}, {})
    found, wanted = methods.of_checkpoint(raw, shapes), methods.split(method)[1] if method else None
    if wanted and methods.METHODS[wanted].parameters == "target":
        found = wanted
    if wanted not in (None, found):
        raise UserError(f"method={wanted!r}, but {source.name!r} is a checkpoint of method {found!r}: leave method out")
    if methods.METHODS[found].parameters == "model":
        return None
    checkpoint = Found(source.name, flattened(raw), shapes, target.copied_for(1), target_name, checkpoints.parse_config)
    with told(source.path):
        return methods.implementation(found).read(checkpoint)


def laid(model: Model, placement: Placement) -> Model:
    """The model as it lies there: no copy where it does already."""
    if placement.alone:  # its matrices may be turned for the CPU, too
        return model
    known = abstract_params(model.config, model.dtype, placement)
    moved = lambda x, p: jax.device_put(jnp.asarray(x, p.dtype), p.sharding)
    return Model(model.config, {name: moved(x, known[name]) for name, x in model.params.items()})


def check_table(target: ModelConfig, name: str, draft: ModelConfig) -> None:
    """Raises UserError where the draft `name` reads ids in a table that is not the target's."""
    wanted, found = (draft.vocab_size, draft.embed_width), (target.vocab_size, target.width)
    if draft.embed_width and wanted != found:
        raise UserError(
            f"the draft {name!r} reads a table of {wanted[0]} ids and width {wanted[1]}, the target's has {found[0]} "
            f"and {found[1]}: give it the target that it was trained for, or train one for this target"
        )


def check_same_tokenizer(source: Any, tokenizer: Any, draft_source: Any) -> None:
    """A draft must mean the same by an id. Vocabularies padded to different sizes are fine. A head that brings no
    tokenizer is for its target's, as far as can be known."""
    if (wanted := checkpoints.load_fingerprint(draft_source)) is not None:
        if wanted != (found := checkpoints.fingerprint(tokenizer)):
            raise UserError(
                f"the draft {draft_source.name!r} was trained for another tokenizer than that of the target "
                f"{source.name!r} (fingerprint {wanted[:12]}, found {found[:12]}): train one for this target"
            )
        return
    if not checkpoints.has_tokenizer(draft_source):
        return
    mine, theirs = tokenizer.get_vocab(), checkpoints.load_tokenizer(draft_source).get_vocab()
    if mine != theirs:
        tokens = mine.keys() | theirs.keys()
        differing = sum(mine.get(token) != theirs.get(token) for token in tokens)
        raise UserError(
            f"the draft {draft_source.name!r} has another tokenizer than the target {source.name!r} "
            f"({differing} of {len(tokens)} tokens differ): choose a draft of the same family"
        )


def enable_compilation_cache() -> Path | None:
    """Keep compiled programs under the user's cache folder, unless JAX was told another place. Return the folder for
    what else a later start need not make again; None where JAX was told another, and where nothing can be written."""
    ours = cache_folder() / "xla"
    if jax.config.jax_compilation_cache_dir is None and can_write(ours):  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(ours))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return cache_folder() if jax.config.jax_compilation_cache_dir == str(ours) else None  # type: ignore[attr-defined]


@functools.cache  # said once
def can_write(folder: Path) -> bool:
    """Return whether files can be written there, and say so where they cannot."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        reason = error.strerror or error
        say(f"nothing can be kept in {folder} ({reason}), so every start compiles anew: set JAXSPEC_CACHE to another")
        return False
