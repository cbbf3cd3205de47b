"""Forms of quantised weights, named as the option `quantization` names them.

This is plain data, so that options are checked without jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxspec.common.values import one_of


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A form of the matrices of all products but the output head.

    dtype: dtype of the values.
    inputs, outputs: size of the blocks that share a scale; None for all inputs, or all outputs.
    """

    dtype: str
    inputs: int | None
    outputs: int | None

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the size (inputs, outputs) of the blocks of a matrix of this shape."""
        return self.inputs or shape[0], self.outputs or shape[1]


FORMS: Mapping[str, Quantization] = {
    "int8": Quantization("int8", None, 1),
    "int8_block": Quantization("int8", 128, 1),
    "fp8": Quantization("float8_e4m3fn", None, 1),
    "fp8_tensor": Quantization("float8_e4m3fn", None, None),
    "fp8_block": Quantization("float8_e4m3fn", 128, 128),
}
QUANTIZATION_HELP = (
    "Form of the weights in memory: int8 or fp8 with a scale for each output, int8_block with one for each 128 inputs "
    "of an output, fp8_block with one for each block of 128 x 128, fp8_tensor with one for each matrix."
)


def check_quantization(name: str, value: str | None) -> None:
    """Raise UserError, which names the option, for a value that is neither None nor the name of a form."""
    if value is not None:
        one_of(name, value, tuple(FORMS))
