"""The forms of quantised weights in memory, by the names that the option `quantization` takes.

This file is plain data, so that options can be checked without importing jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxspec.common.errors import UserError
from jaxspec.common.values import one_of


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A form of quantised weights: the matrices of all products except the output head have this form.

    dtype: dtype of the quantised values.
    inputs, outputs: numbers of inputs and of outputs in a block of a matrix, each block with one scale; None for all
      inputs, or all outputs, of the matrix.
    activations: dtype to which activations are rounded for a product, with a scale for each token; None to keep them.
    zeros: whether each block has a zero point, an integer that stands for 0.
    scales: dtype of the scales.
    """

    dtype: str
    inputs: int | None
    outputs: int | None
    activations: str | None = None
    zeros: bool = False
    scales: str = "float32"

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the size (inputs, outputs) of the blocks with one scale, for a matrix of this shape."""
        return self.inputs or shape[0], self.outputs or shape[1]


def in_groups(inputs: int, *, zeros: bool = False) -> Quantization:
    """Return the form of weights in 4 bits, in groups of inputs of an output."""
    return Quantization("int4", inputs, 1, zeros=zeros, scales="bfloat16")


FORMS: Mapping[str, Quantization] = {
    "int8": Quantization("int8", None, 1),
    "int8_dynamic": Quantization("int8", None, 1, activations="int8"),
    "int8_block": Quantization("int8", 128, 1),
    "fp8": Quantization("float8_e4m3fn", None, 1),
    "fp8_dynamic": Quantization("float8_e4m3fn", None, 1, activations="float8_e4m3fn"),
    "fp8_tensor": Quantization("float8_e4m3fn", None, None),
    "fp8_block": Quantization("float8_e4m3fn", 128, 128),
    "int4": in_groups(128),
    "int4_64": in_groups(64),
    "int4_32": in_groups(32),
    "int4_asym": in_groups(128, zeros=True),
    "int4_asym_64": in_groups(64, zeros=True),
    "int4_asym_32": in_groups(32, zeros=True),
}


BLOCKS = "gguf"  # value of the option that keeps the blocks of a GGUF file
WITH_HEAD = "+head"  # suffix of a form's name, with which the output head is quantised, too


def form_named(name: str) -> Quantization:
    """Return the form of FORMS with this name, with or without the suffix WITH_HEAD.

    Raises: UserError for BLOCKS, where weights are made or random.
    """
    if name == BLOCKS:
        raise UserError(
            f"quantization={name!r} keeps the blocks of a GGUF file, and makes none: give a .gguf file as the model, "
            "or take int4 or int8"
        )
    return FORMS[name.removesuffix(WITH_HEAD)]


def form_of_head(name: str) -> Quantization | None:
    """Return the form of the output head if a form's name has the suffix WITH_HEAD, else None.

    The head's weights are int8, the form with the smallest rounding error. Activations before the head are rounded to
    int8 if the form of the other matrices rounds activations.
    """
    if not name.endswith(WITH_HEAD):
        return None
    return FORMS["int8_dynamic" if form_named(name).activations else "int8"]


def form_name(form: Quantization) -> str:
    """Return the name of a form, or a description of a form that a checkpoint may have but the option does not make."""
    for name, known in FORMS.items():
        if form == dataclasses.replace(known, scales=form.scales):
            return name
    if form.dtype == "int4":
        return f"int4 in groups of {form.inputs or 'all inputs'}{' with zero points' if form.zeros else ''}"
    return f"{form.dtype} in blocks of {form.inputs or 'all'} inputs and {form.outputs or 'all'} outputs"


def check_quantization(name: str, value: str | None) -> None:
    """Raise UserError, which names the option, unless the value is None, the name of a form in FORMS, or BLOCKS.

    The name of a form may have the suffix WITH_HEAD.
    """
    if value is not None and not (isinstance(value, str) and value.removesuffix(WITH_HEAD) in FORMS):
        one_of(name, value, (*FORMS, *(form + WITH_HEAD for form in ("int8", "fp8_dynamic")), BLOCKS))
