"""A drafting head's own embedding table and output head, where the head does not share the target's."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.models.backend import Backend
from jaxspec.models.head import Head
from jaxspec.models.parameters import declare
from jaxspec.models.table import looked_up


class OwnParts(Head):
    """Base class of drafting heads (small networks that draft from the target's hidden states).

    A head has its own embedding table if `has_table`, and its own output head if `has_head`. Otherwise it uses the
    target's.
    """

    def __init__(self, config: Any, dtype: Any) -> None:
        self.config = config
        self.has_table, self.has_head = config.has_table, config.has_head
        if config.has_table:
            self.embed = declare("table", dtype)(config.vocab_size, config.width, axes=("vocab", None))
        if config.has_head:
            self.declare_head(config, dtype)

    def embedded(self, tokens: Int[Array, "*n"], backend: Backend) -> Float[Array, "*n E"]:
        """Look tokens up in the head's own embedding table, and multiply the embeddings by `config.embed_scale`.

        A table that replaces the target's has the target's scale.
        """
        x = looked_up(self.embed[...], tokens, backend)
        scale = self.config.embed_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)
