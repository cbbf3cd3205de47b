"""Pages in 8 bits, read as 32-bit words, so that a GPU kernel converts two numbers by one instruction.

A word holds four neighbouring numbers of one key, or of one value. `unpacked` converts the numbers to bfloat16 for the
matrix units, and permutes the columns of a head. The result stays right, because queries, keys and results have the
same permutation (`columns`).

For the product with values, a matrix unit takes numbers of two neighbouring tokens from one register. Triton's own
conversion loads them as single bytes from shared memory. Here a whole word of each token is loaded, and bytes in the
same place of both words are converted together.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.device import Device
from pallas_kernels.pages import AnyPages, ScaledPages
from pallas_kernels.weights.interleaved_grouped import joined

BYTES = 4  # bytes of a word
LEAST_HEAD = 64  # least size of a head: a product of the matrix units takes 16 words at least


def can_be_read(pages: AnyPages, dtype: Any, device: Device) -> bool:
    """Return whether a kernel can read the pages as 32-bit words. dtype: dtype of the queries."""
    if not isinstance(pages, ScaledPages) or pages.dtype not in (jnp.int8, jnp.float8_e4m3fn):
        return False
    head = pages.shape[-1]
    size = head >= LEAST_HEAD and head & (head - 1) == 0
    return size and dtype == jnp.bfloat16 and (device.interpret or device.reaches(8, 0))


def words(values: jax.Array) -> jax.Array:
    """Return the values [..., D] of pages as words i32[..., D / 4]. XLA does not copy them."""
    return lax.bitcast_convert_type(values.reshape(*values.shape[:-1], -1, BYTES), jnp.int32)


def columns(head: int) -> list[jax.Array]:
    """Return the columns of a head in the two arrays that `unpacked` returns. head: size D of the head."""
    column = jnp.arange(head // 2, dtype=jnp.int32)
    each = BYTES * lax.rem(column, head // BYTES) + lax.div(column, head // BYTES)
    return [each + j for j in range(0, BYTES, 2)]


def divisor(dtype: Any) -> float:
    """Return the number by which `unpacked` divides the values. dtype: dtype of the values."""
    return 64.0 if dtype == jnp.int8 else 1.0


def unpacked(read: jax.Array, dtype: Any, device: Device) -> list[jax.Array]:
    """Unpack words [keys, n] into two arrays [keys, 2 n] in bfloat16, inside a kernel.

    The first array has byte 0 of all words of a key, then byte 1 of all. The second array has bytes 2 and 3 likewise.
    Numbers in int8 come out divided by `divisor`, with which the caller multiplies their scales.

    read: i32[keys, n], words of keys or values.
    dtype: dtype of the bytes, int8 or float8_e4m3fn.
    """
    convert = _byte_of_interpreted if device.interpret else _byte
    return joined([convert(read, dtype, j) for j in range(BYTES)], 2)


def _byte(read: jax.Array, dtype: Any, j: int) -> jax.Array:
    """Return byte j of each word in bfloat16.

    The instructions convert that byte of two words together. `weights/interleaved.py` explains the arithmetic.
    """
    if dtype == jnp.int8:  # both bytes plus 128, each in the low bits of a bfloat16
        pick = f"prmt.b32 a, $1, $2, {0x0400 + 0x0101 * j:#06x}"
        pick += "; mov.b32 b, 0x00800080; lop3.b32 a, a, 0x00ff00ff, b, 0x6a"
        factor, addend = "0x7f007f00", "0xc000c000"  # 2^127 and -2
    else:  # both bytes, each in the high bits of a bfloat16
        pick = f"prmt.b32 b, $1, $2, {0x4000 + 0x1010 * j:#06x}"
        pick += "; shr.u32 a, b, 4; and.b32 a, a, 0x07f007f0; lop3.b32 a, b, 0x80008000, a, 0xea"
        factor, addend = "0x7b807b80", "0x80008000"  # 2^120 and -0
    registers = f".reg .b32 a, b, factor, addend; mov.b32 factor, {factor}; mov.b32 addend, {addend}"
    (found,) = plgpu.elementwise_inline_asm(
        f"{{ {registers}; {pick}; fma.rn.bf16x2 $0, a, factor, addend; }}",
        args=[read],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(read.shape, jnp.bfloat16)],
    )
    return found


def _byte_of_interpreted(read: jax.Array, dtype: Any, j: int) -> jax.Array:
    """Return byte j of each word as `_byte` does, in plain jnp for an interpreted kernel."""
    byte = (read >> 8 * j & 0xFF).astype(jnp.uint8)
    value: jax.Array = lax.bitcast_convert_type(byte, dtype).astype(jnp.bfloat16)
    return value / divisor(dtype)
