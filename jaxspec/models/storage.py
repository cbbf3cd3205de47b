"""The forms in memory of parameters that programs read fastest.

On a single CPU device, with the default kernels and activations in float32, matrices are stored with the output axis
first. Their dtype is bfloat16 if that changes no value. Matrices of 8 bits remain in 8 bits, and those of 4 bits in 4.
Integers of 5 or 6 bits get 8 bits, because a CPU would combine them from two places.

On GPUs whose kernels read matrices of 8 or 4 bits, the inputs of these matrices are reordered for the kernels.
Otherwise parameters keep their form.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, compute_dtype, parameters
from jaxspec.models.parameters import Parameter
from pallas_kernels.streamed import num_streams
from pallas_kernels.weights import Weight, interleaved_grouped
from pallas_kernels.weights.grouped import Grouped
from pallas_kernels.weights.interleaved import Interleaved, can_be_interleaved, interleaved
from pallas_kernels.weights.output_first import Streamed
from pallas_kernels.weights.scaled import Scaled, StreamedScaled
from pallas_kernels.weights.streamed_grouped import StreamedGrouped, streamed_form


def stored_for(backend: Backend, config: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters in the forms that the programs of this backend read fastest.

    The dict `params` may be emptied, so that memory never holds both forms of all parameters. Pass a copy of a dict
    that other code uses.
    """
    if backend.interleaves:
        return {name: interleaved_if_read(params.pop(name)) for name in list(params)}
    if not backend.streams or compute_dtype(params) != jnp.float32:
        return params
    if any(isinstance(x, Streamed | StreamedScaled | StreamedGrouped) for x in params.values()):
        return params
    known = parameters(config)
    streamed = {name for name, x in params.items() if not isinstance(x, Weight) and streams_alone(known[name], x)}
    halved = all(same_in_bfloat16(params[name]) for name in streamed)
    found: dict[str, Any] = {}
    for name in list(params):  # converts one parameter at a time, so that memory holds only one twice
        x = params.pop(name)
        if halved and name in streamed:
            x = x.astype(jnp.bfloat16)
        if isinstance(x, Scaled) and x.by_output:
            x = x.in_form(StreamedScaled)
        elif isinstance(x, Grouped):
            x = streamed_form(x)
        elif known[name].kind == "matrix" and not isinstance(x, Weight):
            x = Streamed(x.T)
        found[name] = jax.block_until_ready(x)
    return found


def interleaved_if_read(x: Any) -> Any:
    """Return a parameter in the form whose inputs are reordered if the kernels read it in that form, else unchanged."""
    if type(x) is Scaled and can_be_interleaved(x, x.values.sharding.shard_shape(x.values.shape)):
        places: Any = jax.tree.map(lambda array: array.sharding, x.in_form(Interleaved))
        return jax.block_until_ready(jax.jit(interleaved, out_shardings=places)(x))
    if type(x) is Grouped and interleaved_grouped.can_be_interleaved(x, shard_of(x)):
        places = interleaved_grouped.placed(jax.tree.map(lambda array: array.sharding, x))
        return jax.block_until_ready(jax.jit(interleaved_grouped.interleaved, out_shardings=places)(x))
    return x


def shard_of(x: Grouped) -> tuple[int, ...]:
    """Return the shape [O, I] of the part of a matrix that a device holds."""
    outputs, size = x.values[0].sharding.shard_shape(x.values[0].shape)
    return outputs, size * 8 // x.layout.bits[0]


def narrow(params: Params) -> bool:
    """Return whether some of the parameters are stored in bfloat16."""
    return any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))


def streams_alone(parameter: Parameter, x: jax.Array) -> bool:
    """Return whether matrix products stream a parameter (`pallas_kernels.streamed`) even for a single input row.

    A matrix, or a table that is the output head, can be streamed. In other products the compiler's library would
    convert a bfloat16 matrix to float32 each time.

    x: the parameter's values.
    """
    if parameter.kind == "matrix":
        return num_streams(1, *x.shape) > 1
    return parameter.head and num_streams(1, *x.shape[::-1]) > 1


@jax.jit
def same_in_bfloat16(x: jax.Array) -> jax.Array:
    """Return whether bfloat16 represents every value of x exactly."""
    return jnp.all(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) == x)
