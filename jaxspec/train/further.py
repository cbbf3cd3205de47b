"""Initialising a draft from a draft of an earlier run, with the same ids and shape, or with more layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.common.errors import UserError
from jaxspec.common.values import flag_of
from jaxspec.models.decoder import parameters
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.model import Model
from jaxspec.train import build, methods
from jaxspec.train.train_options import TrainOptions
from pallas_kernels.weights import dense

OUTPUTS = ("out", "down")  # a layer's output projections; with zeros in these it leaves the residual stream unchanged
OF_THE_DATA = ("mask_id",)  # fields of a head's configuration that depend on the training data


def begun(draft: Model, target: Model, options: TrainOptions, counts: np.ndarray, placement: Any) -> Model:
    """Return the draft with which training begins: `draft`, with options.layers layers if it has fewer.

    draft: the one that options.init_from names, in float32. counts i64[V]: occurrences of each id in the training data.

    Raises: UserError for a draft of another method or target, and for options that ask for another shape.
    """
    given = f"--init-from {options.init_from}"
    c = draft.config
    method = methods.implementation(options.method)
    made_for = draft_spec(c).method
    if made_for != options.method:
        raise UserError(f"{given} is a draft of the method {made_for}: give --method {made_for}")
    if c.vocab_size != target.config.vocab_size:
        raise UserError(
            f"{given} is a draft for {c.vocab_size} ids, the target has {target.config.vocab_size}: give another draft"
        )
    shape = {option: value for option, value in shape_of(draft).items() if option in method.TAKES}
    deepens = "layers.0.out" in draft.params and (options.layers or 0) > c.num_layers
    for option, has in shape.items():
        wanted = getattr(options, option)
        if wanted not in (None, has) and not (option == "layers" and deepens):
            flag = flag_of(option)
            raise UserError(f"{given} has {option}={has}, not {flag} {wanted}: leave {flag} out")
    if method.READS:
        new = method.new(dataclasses.replace(options, init_from=None, **shape), target, counts, placement)
        check_passes(draft, new, options)
    if not deepens:
        return draft
    return deeper(draft, target, options.layers or 0, placement, options.seed)


def shape_of(draft: Model) -> dict[str, Any]:
    """Return the shape options (see `build.SHAPE`) with which a new draft would have the shape of this one."""
    c = draft.config
    fields = build.SHAPE | {name: name for name in build.OF_HEADS if hasattr(c, name)}
    if hasattr(c, "depth"):  # Medusa's heads have blocks in place of layers
        fields["layers"] = "depth"
    if draft_spec(c).method != "draft_model":
        fields["vocab_size"] = "reduced_vocab_size"  # None if the draft uses the target's output head
    shape = {option: getattr(c, name) for option, name in fields.items()}
    return shape if c.rare_vocab_size else shape | {"rare_width": None}


def check_passes(draft: Model, new: Model, options: TrainOptions) -> None:
    """Raise UserError if a head's configuration differs from that of a new head of the same shape.

    Heads that other programs wrote may differ. Training would then run other passes than such a head was made for.

    draft: the given head. new: the new head.
    """
    for field in dataclasses.fields(new.config):
        has = getattr(draft.config, field.name)
        makes = getattr(new.config, field.name)
        if has != makes and field.name not in OF_THE_DATA:
            raise UserError(
                f"--init-from {options.init_from} has {field.name}={has}, and --method {options.method} trains "
                f"drafts with {makes}: give another draft"
            )


def deeper(draft: Model, target: Model, layers: int, placement: Any, seed: int) -> Model:
    """Return the draft with `layers` layers.

    The new layers come last. They start as the target's last layer where the shapes agree, but with zeros in their
    output projections, so that the draft's predictions stay the same.
    """
    c = draft.config
    last = f"layers.{target.config.num_layers - 1}."
    windows = c.windows + c.windows[-1:] * (layers - c.num_layers)
    config = dataclasses.replace(c, num_layers=layers, windows=windows)
    known: dict[str, Any] = dict(draft.params)
    for name, p in parameters(config).items():
        rest = name.split(".", 2)[-1]
        theirs = target.params.get(last + rest)
        if name in known:
            continue
        if rest in OUTPUTS:
            known[name] = jnp.zeros(p.shape)
        elif theirs is not None and theirs.shape == p.shape:
            known[name] = dense(theirs)
    return Model(config, build.initial_params(config, target, placement, seed, known))
