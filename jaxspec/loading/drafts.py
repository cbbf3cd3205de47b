"""Drafts: their weights, and whether they fit their target."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import jax

import checkpoints
from checkpoints import heads, names
from jaxspec.common.errors import MisfitError, UserError
from jaxspec.loading.resolved import ResolvedModel, reread
from jaxspec.loading.weights import load
from jaxspec.models.decoder import abstract_params, parameters
from jaxspec.models.model import Model
from jaxspec.models.sharding import check_divides
from pallas_kernels.weights import dense

logger = logging.getLogger(__name__)


def load_draft(draft: ResolvedModel, dtype: Any, placement: Any, target: Model) -> Model:
    """Load a draft for this target, of whichever method it is. Raises: UserError where it does not fit, else as
    `checkpoints.load_params` does."""
    draft = compared(draft, lambda name: dense(target.params[name]))
    if draft.reading is None:
        return load(draft, dtype, placement, target)
    if draft.reading.remark:
        logger.warning("%s", draft.reading.remark)
    check_divides(draft.config, placement.degree, of_draft=True)
    abstract = abstract_params(draft.config, dtype, placement)
    return Model(draft.config, heads.load(draft.source.path, draft.reading, abstract))


def compared(draft: ResolvedModel, theirs: Callable[[str], jax.Array]) -> ResolvedModel:
    """Compare a head's copies of the target's tensors with these. A copy that differs is used where the head has a use
    for it, and refused elsewhere. theirs(name): a parameter of the target."""
    if draft.reading is None or draft.target is None:
        return draft
    target = draft.target.config
    own = names.hf(target.family).places if draft.within else ()
    copies = {name: place for name, place in draft.reading.copies.items() if re.sub(r"\d+", "{}", name) not in own}
    if not (differing := heads.differing(draft.source.path, copies, target, parameters(target), theirs)):
        return draft
    draft = reread(draft, differing)
    if draft.reading and draft.target and (refused := sorted(differing - draft.reading.names.keys())):
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise MisfitError(
            f"the draft {draft.name!r} was made beside another target than {draft.target.name!r}: its tensor "
            f"{refused[0]}{more} differs from the target's, which is used in its place; give it the target that it was "
            "trained for"
        )
    return draft


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
