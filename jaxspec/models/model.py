"""Model: a configuration with loaded parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import compute_dtype
from jaxspec.models.storage import stored_for


@dataclasses.dataclass(frozen=True)
class Model:
    """A configuration with its loaded parameters."""

    config: ModelConfig
    params: dict[str, Any]

    @property
    def dtype(self) -> Any:
        """Dtype of the model's activations."""
        return compute_dtype(self.params)

    def stored_for(self, backend: Backend) -> Model:
        """Return the model with its parameters in the forms that programs of the backend read fastest."""
        return dataclasses.replace(self, params=stored_for(backend, self.config, self.params))
