"""Loading a draft, and checking that the draft fits its target."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import checkpoints
from checkpoints import head_folders, names
from jaxspec.common.errors import MisfitError, UserError
from jaxspec.loading.quantised import keeper
from jaxspec.loading.resolved import ResolvedModel, reread
from jaxspec.loading.weights import load
from jaxspec.models.decoder import abstract_params, parameters
from jaxspec.models.model import Model
from jaxspec.models.sharding import check_divides
from pallas_kernels.weights import AnyWeight

logger = logging.getLogger(__name__)


def load_draft(
    draft: ResolvedModel, dtype: Any, placement: Any, target: Model, *, quantization: str | None = None
) -> Model:
    """Load a draft of any drafting method for this target.

    quantization: form of the draft's weights in memory, as in `jaxspec.loading.weights.load`.
    Raises: UserError if the draft does not fit the target, other errors as `checkpoints.load_params` does.
    """
    draft = with_compared_copies(draft, target.params.__getitem__)
    if draft.reading is None:
        return load(draft, dtype, placement, target, quantization=quantization)
    if draft.reading.remark:
        logger.warning("%s", draft.reading.remark)
    check_divides(draft.config, placement.degree, of_draft=True)
    abstract = abstract_params(draft.config, dtype, placement)
    keep = keeper(draft, quantization)
    return Model(draft.config, head_folders.load(draft.source.path, draft.reading, abstract, keep=keep))


def with_compared_copies(draft: ResolvedModel, target_parameter: Callable[[str], AnyWeight]) -> ResolvedModel:
    """Compare the tensors in a drafting head's checkpoint that copy tensors of the target with the target's own.

    Return the head, read so that the target's tensors replace equal copies. A copy that differs becomes a parameter of
    the head, if the head's architecture has such a parameter.

    target_parameter: function from a parameter's name to the target's values.
    Raises: MisfitError for a copy that differs and cannot become a parameter of the head.
    """
    if draft.reading is None or draft.target is None:
        return draft
    target = draft.target.config
    # A head within the target's checkpoint shares the target's tensors, which need no comparison.
    own = names.hf(target.family).places if draft.within else ()
    copies = {name: place for name, place in draft.reading.copies.items() if re.sub(r"\d+", "{}", name) not in own}
    differing = head_folders.differing_copies(draft.source.path, copies, target, parameters(target), target_parameter)
    if not differing:
        return draft
    draft = reread(draft, differing)
    assert draft.reading is not None
    assert draft.target is not None
    refused = sorted(differing - draft.reading.names.keys())
    if refused:
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise MisfitError(
            f"the draft {draft.name!r} was made beside another target than {draft.target.name!r}: its tensor "
            f"{refused[0]}{more} differs from the target's, which is used in its place; give it the target that it was "
            "trained for"
        )
    return draft


def check_same_tokenizer(source: Any, tokenizer: Any, draft_source: Any) -> None:
    """Raise UserError if a draft's token ids do not mean the same tokens as the target's.

    A fingerprint is a digest of the tokenizer that a draft was trained for. A draft with neither a tokenizer nor a
    fingerprint is assumed to use its target's tokenizer. Vocabularies that are only padded to different sizes count as
    equal.

    source, draft_source: the checkpoints of target and draft. tokenizer: the target's tokenizer.
    """
    wanted = checkpoints.load_fingerprint(draft_source)
    if wanted is not None:
        found = checkpoints.fingerprint(tokenizer)
        if wanted != found:
            raise UserError(
                f"the draft {draft_source.name!r} was trained for another tokenizer than that of the target "
                f"{source.name!r} (fingerprint {wanted[:12]}, found {found[:12]}): train one for this target"
            )
        return
    if not checkpoints.has_tokenizer(draft_source):
        return
    own = tokenizer.get_vocab()
    others = checkpoints.load_tokenizer(draft_source).get_vocab()
    if own != others:
        tokens = own.keys() | others.keys()
        differing = sum(own.get(token) != others.get(token) for token in tokens)
        raise UserError(
            f"the draft {draft_source.name!r} has another tokenizer than the target {source.name!r} "
            f"({differing} of {len(tokens)} tokens differ): choose a draft of the same family"
        )
