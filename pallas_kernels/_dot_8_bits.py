"""Matrix product of two blocks of int8 or float8_e4m3fn values inside a Triton kernel, for Hopper's tensor cores.

Triton converts e4m3 values to float16, which halves the speed, unless the dot operation allows sums of less precision
than float32. Hopper's tensor cores keep about 14 bits of a sum of e4m3 products. Pallas has no option that allows it,
so this file defines a primitive of its own. The caller adds each block's result to a float32 sum. So sums of less
precision never span more than one block of the contracted dimension.
"""

import importlib
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import Device

ANY_DEPTH = 1 << 30  # number of products that may be summed with less precision than float32

_dot = jax.extend.core.Primitive("dot_8_bits")


def dot(a: jax.Array, b: jax.Array, device: Device) -> jax.Array:
    """Multiply a [M, K] with the transpose of b [N, K], inside a kernel. Return [M, N].

    The result is f32 for float8_e4m3fn. For int8 it is i32 and exact.
    """
    if a.dtype == jnp.int8 or device.interpret or not _registered():
        dtype = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    result: jax.Array = _dot.bind(a, b)
    return result


_dot.def_abstract_eval(lambda a, b: jax.core.ShapedArray((a.shape[0], b.shape[0]), jnp.float32))


def _registered() -> bool:
    """Tell Pallas how to lower the operation. Return False if this version of JAX has other names for what it takes.

    Products are then as exact, and slower.
    """
    try:
        lowering: Any = importlib.import_module("jax._src.pallas.triton.lowering")
        rules, dialect, zeros = lowering.triton_lowering_rules, lowering.tt_dialect, lowering._zeros
        tensor, to_ir = lowering.ir.RankedTensorType, lowering._dtype_to_ir_type
    except (ImportError, AttributeError):
        return False

    def lower(context: Any, a: Any, b: Any) -> Any:
        sums = zeros(tensor.get(context.avals_out[0].shape, to_ir(jnp.dtype(jnp.float32))))
        return dialect.dot(a, dialect.trans(b, (1, 0)), sums, max_num_imprecise_acc=ANY_DEPTH)

    rules.setdefault(_dot, lower)
    return True
