"""The forms of quantised weights in memory, by the names that the option `quantization` takes.

This file is plain data, so that options can be checked without importing jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxspec.common.values import one_of


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A form of quantised weights: the matrices of all products except the output head have this form.

    dtype: dtype of the quantised values.
    inputs, outputs: numbers of inputs and of outputs in a block of a matrix, each block with one scale; None for all
      inputs, or all outputs, of the matrix.
    activations: dtype to which activations are rounded for a product, with a scale for each token; None to keep them.
    """

    dtype: str
    inputs: int | None
    outputs: int | None
    activations: str | None = None

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the size (inputs, outputs) of the blocks with one scale, for a matrix of this shape."""
        return self.inputs or shape[0], self.outputs or shape[1]


FORMS: Mapping[str, Quantization] = {
    "int8": Quantization("int8", None, 1),
    "int8_dynamic": Quantization("int8", None, 1, activations="int8"),
    "int8_block": Quantization("int8", 128, 1),
    "fp8": Quantization("float8_e4m3fn", None, 1),
    "fp8_dynamic": Quantization("float8_e4m3fn", None, 1, activations="float8_e4m3fn"),
    "fp8_tensor": Quantization("float8_e4m3fn", None, None),
    "fp8_block": Quantization("float8_e4m3fn", 128, 128),
}


def form_name(form: Quantization) -> str:
    """Return the name of a form, or a description of a form that a checkpoint may have but the option does not make."""
    for name, known in FORMS.items():
        if form == known:
            return name
    return f"{form.dtype} in blocks of {form.inputs or 'all'} inputs and {form.outputs or 'all'} outputs"


def check_quantization(name: str, value: str | None) -> None:
    """Raise UserError, which names the option, unless the value is None or the name of a form in FORMS."""
    if value is not None:
        one_of(name, value, tuple(FORMS))
