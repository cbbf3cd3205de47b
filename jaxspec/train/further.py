"""What a draft that is trained further begins with: the draft of another run, with its ids and its shape, or deeper."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.common.errors import UserError
from jaxspec.models.decoder import parameters
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.model import Model
from jaxspec.train import build, methods
from jaxspec.train.options import TrainOptions

LEADS_OUT = ("out", "down")  # of a layer: with zeros in these it adds nothing
OF_THE_DATA = ("mask_id",)  # of a head


def begun(draft: Model, target: Model, options: TrainOptions, counts: np.ndarray, placement: Any) -> Model:
    """The draft of `options.init_from`, in float32, as deep as is asked for; counts as `methods` has them. Raises
    UserError where it is for another method or target, and for options that ask for another shape."""
    given, c, method = f"--init-from {options.init_from}", draft.config, methods.implementation(options.method)
    if (made_for := draft_spec(c).method) != options.method:
        raise UserError(f"{given} is a draft of the method {made_for}: give --method {made_for}")
    if c.vocab_size != target.config.vocab_size:
        raise UserError(f"{given} is a draft for {c.vocab_size} ids, the target has {target.config.vocab_size}")
    shape = {option: value for option, value in shape_of(draft).items() if option in method.TAKES}
    deepens = "layers.0.out" in draft.params and (options.layers or 0) > c.num_layers
    for option, has in shape.items():
        wanted = getattr(options, option)
        if wanted not in (None, has) and not (option == "layers" and deepens):
            flag = "--" + option.replace("_", "-")
            raise UserError(f"{given} has {has} where {flag} {wanted} asks for another shape: leave {flag} out")
    if method.READS:
        new = method.new(dataclasses.replace(options, init_from=None, **shape), target, counts, placement)
        check_passes(draft, new, options)
    return deeper(draft, target, options.layers or 0, placement, options.seed) if deepens else draft


def shape_of(draft: Model) -> dict[str, Any]:
    """The options of shape that a draft was made with."""
    c = draft.config
    fields = build.SHAPE | {name: name for name in build.OF_HEADS if hasattr(c, name)}
    if hasattr(c, "depth"):  # of heads that have no layers
        fields["layers"] = "depth"
    if draft_spec(c).method != "draft_model":
        fields["vocab_size"] = "reduced_vocab_size"  # None: the target's way to ids
    shape = {option: getattr(c, name) for option, name in fields.items()}
    return shape if c.rare_vocab_size else shape | {"rare_width": None}


def check_passes(draft: Model, new: Model, options: TrainOptions) -> None:
    """Raises UserError where a head is not what its shape makes here, since its passes would be others: heads are also
    written by others."""
    for field in dataclasses.fields(new.config):
        has, makes = getattr(draft.config, field.name), getattr(new.config, field.name)
        if has != makes and field.name not in OF_THE_DATA:
            raise UserError(
                f"--init-from {options.init_from} has {field.name} {has}, and --method {options.method} as asked for "
                f"trains {makes}: begin with another"
            )


def deeper(draft: Model, target: Model, layers: int, placement: Any, seed: int) -> Model:
    """The draft with so many layers. Those behind its own begin as the target's last where the shapes agree, and add
    nothing, so that the draft is as good as it was."""
    c, last = draft.config, f"layers.{target.config.num_layers - 1}."
    config = dataclasses.replace(c, num_layers=layers, windows=c.windows + c.windows[-1:] * (layers - c.num_layers))
    known: dict[str, Any] = dict(draft.params)
    for name, p in parameters(config).items():
        rest = name.split(".", 2)[-1]
        theirs = target.params.get(last + rest)
        if name in known:
            continue
        if rest in LEADS_OUT:
            known[name] = jnp.zeros(p.shape)
        elif theirs is not None and theirs.shape == p.shape:
            known[name] = theirs
    return Model(config, build.begun(config, target, placement, seed, known))
