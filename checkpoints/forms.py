"""Weights in the forms that the option `quantization` names, and that checkpoints have."""

from __future__ import annotations

from typing import Any

import jax

from jaxspec.options.quantization import Quantization
from pallas_kernels.weights import Weight, grouped, scaled


def layout(form: Quantization) -> grouped.Layout | None:
    """Return how groups of a form lie in memory, None for a form of 8 bits with a scale alone."""
    if form.dtype == "int4":
        return grouped.in_four_bits(form.inputs or 0, form.scales, zeros=form.zeros)
    return grouped.BLOCKS.get(form.dtype)


def abstract(form: Quantization, shape: Any, computes_in: str) -> Weight:
    """Return a matrix [I, O] in a form, whose arrays have shapes and dtypes but no values.

    computes_in: dtype of the activations.
    """
    if found := layout(form):
        return grouped.abstract(found, shape, computes_in)
    return scaled.abstract(shape, form.dtype, form.block(shape), computes_in, form.activations)


def quantise(x: jax.Array, form: Quantization) -> Weight:
    """Return a matrix [I, O] in a form that the option `quantization` names."""
    if found := layout(form):
        return grouped.quantise(x, found)
    shape: Any = x.shape
    return scaled.quantise(x, dtype=form.dtype, block=form.block(shape), activations=form.activations)
