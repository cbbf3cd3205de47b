"""Parts that a head beside a target may have of its own, in the place of the target's."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxspec.models.head import Head
from jaxspec.models.parameters import declare
from jaxspec.models.table import looked_up


class OwnParts(Head):
    """A head beside a target, with a table of ids and a way to logits where its configuration has `has_table` and
    `has_head`; else the target's are used."""

    def __init__(self, config: Any, dtype: Any) -> None:
        self.config, self.has_table, self.has_head = config, config.has_table, config.has_head
        if config.has_table:
            self.embed = declare("table", dtype)(config.vocab_size, config.width, axes=("vocab", None))
        if config.has_head:
            self.declare_head(config, dtype)

    def embedded(self, tokens, backend):
        """Look tokens up in its own table, scaled as the target's is where it stands for that."""
        x = looked_up(self.embed[...], tokens, backend)
        return x * jnp.asarray(self.config.embed_scale, x.dtype) if self.config.embed_scale != 1.0 else x
