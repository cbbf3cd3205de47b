"""Weights in the forms that the option `quantization` names, and that checkpoints have."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxspec.options.quantization import Quantization
from pallas_kernels.weights import Weight, grouped, scaled


def layout(form: Quantization) -> grouped.Layout | None:
    """Return how groups of a form lie in memory, None for a form of 8 bits with a scale alone."""
    if form.dtype == "int4":
        return grouped.in_four_bits(form.inputs or 0, form.scales, zeros=form.zeros)
    return grouped.BLOCKS.get(form.dtype)


def form_of(weight: Weight) -> Quantization | None:
    """Return the form in which `quantise` makes weights of a weight's dtype and blocks; None if it makes none."""
    if isinstance(weight, scaled.Scaled):
        blocks = weight.scale.shape
        return Quantization(weight.values.dtype.name, weight.shape[0] // blocks[1], weight.shape[1] // blocks[0])
    if isinstance(weight, grouped.Grouped) and weight.layout not in grouped.BLOCKS.values():
        ((scales, inputs),) = weight.layout.scale
        return Quantization("int4", inputs, 1, zeros=weight.layout.has_zeros, scales=scales)
    return None


def abstract(form: Quantization, shape: Any, computes_in: str) -> Weight:
    """Return a matrix [I, O] in a form, whose arrays have shapes and dtypes but no values.

    computes_in: dtype of the activations.
    """
    if found := layout(form):
        return grouped.abstract(found, shape, computes_in)
    return scaled.abstract(shape, form.dtype, form.block(shape), computes_in, form.activations)


@functools.partial(jax.jit, static_argnames="form")
def rounded(x: jax.Array, form: Quantization) -> jax.Array:
    """Return a matrix [I, O] as the values that it has in a form: quantised, and dequantised again."""
    return quantise(x, form).dense()


def quantise(x: jax.Array, form: Quantization) -> Weight:
    """Return a matrix [I, O] in a form that the option `quantization` names."""
    if found := layout(form):
        return grouped.quantise(x, found)
    shape: Any = x.shape
    return scaled.quantise(x, dtype=form.dtype, block=form.block(shape), activations=form.activations)
