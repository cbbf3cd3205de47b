"""Weight matrices in 8 bits whose inputs are reordered, so that a GPU kernel converts two values by one instruction.

The matrix units of a GPU multiply bfloat16, so the 8-bit values have to be converted on their way there. A thread reads
32-bit words of four values. Two values that it converts at the same time must be in the even bytes of a word, or in the
odd bytes, and must belong to neighbouring inputs. `reordered` brings the inputs into that order.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.device import Device
from pallas_kernels.weights.scaled import Scaled

CHUNK = 128  # number of inputs that are reordered among each other
OUTPUTS = 64  # divisor of the number of outputs of the matrices that kernels read
MAX_SIZE = 1 << 28  # exclusive upper bound of the number of elements of the matrices that kernels read
MAX_SIZE_8_BITS = 1 << 31  # the same for matrices in 8 bits: XLA would convert larger ones, such as output heads, first
QUARTER = CHUNK // 4  # number of words of a chunk, and number of inputs in each of the parts that `unpacked` returns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Interleaved(Scaled):
    """An 8-bit matrix whose inputs are reordered as by `reordered`. Every other property is that of `Scaled`.

    values: [O, I], int8 or float8_e4m3fn. I is a multiple of CHUNK.
    """

    form: ClassVar[str] = "interleaved"

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        if not self.by_output:
            return self.natural().matmul(x, dtype)
        # Reordering x costs less than reordering the matrix.
        return super().matmul(reordered(x), dtype)

    def rows(self) -> jax.Array:
        return self.natural().rows()

    def natural(self) -> Scaled:
        pieces = self.values.reshape(len(self.values), -1, CHUNK // 8, 2, 2, 2)
        values = pieces.transpose(0, 1, 3, 5, 2, 4).reshape(self.values.shape)
        return self.in_form(Scaled, values=values)


def interleaved(weight: Scaled) -> Interleaved:
    """Return a weight in the form `Interleaved`."""
    return weight.in_form(Interleaved, values=reordered(weight.values))


def can_be_interleaved(weight: Scaled, shard: tuple[int, ...]) -> bool:
    """Return whether kernels would read a weight in the form `Interleaved`. shard: shape [O, I] of a device's part.

    If activations are rounded to 8 bits, too, nothing is converted, and kernels read the inputs in their own order.
    """
    outputs, inputs = shard
    block = weight.shape[0] // weight.scale.shape[1]
    divides = inputs % CHUNK == block % CHUNK == outputs % OUTPUTS == 0
    most = MAX_SIZE_8_BITS if weight.by_output else MAX_SIZE  # more rows of x would copy a large matrix with blocks
    return not weight.activations and divides and weight.dtype == jnp.bfloat16 and inputs * outputs < most


def reordered(x: jax.Array) -> jax.Array:
    """Return x [..., I] with the last axis in the order of an `Interleaved` weight's inputs.

    The number of an input within its chunk has the bits h, b, t (four bits) and e, from the highest to the lowest. Its
    place has the bits t, h, e and b: it is in word 2t + h of the chunk, in byte 2e + b of the word.
    """
    pieces = x.reshape(*x.shape[:-1], -1, 2, 2, CHUNK // 8, 2)
    axes = range(x.ndim)
    h, b, t, e = range(x.ndim, x.ndim + 4)
    return pieces.transpose(*axes, t, h, e, b).reshape(x.shape)


def unpacked(words: jax.Array, dtype: Any, device: Device) -> list[jax.Array]:
    """Return the four quarters of each chunk in bfloat16, inside a kernel. Integers are divided by 64.

    words: i32[O, n], words of an `Interleaved` weight's values, for a multiple of QUARTER.
    dtype: dtype of the values, int8 or float8_e4m3fn.
    Returns: four arrays [O, n]. Element [o, i] of array j is the value of input i % QUARTER of quarter j, in the chunk
      i // QUARTER.
    """
    if device.interpret:
        return [_quarter(words, dtype, j) for j in range(4)]
    if dtype == jnp.int8:  # adds 128, so that bytes are unsigned
        words ^= jnp.int32(-0x7F7F7F80)
    quarters = []
    for j in range(4):
        (quarter,) = plgpu.elementwise_inline_asm(
            _code(dtype, j),
            args=[words],
            constraints="=r,r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
        )
        quarters.append(quarter)
    return quarters


def _code(dtype: Any, j: int) -> str:
    """Return the instructions that convert two values of quarter j, of the words $1 and $2, to bfloat16.

    A byte of an integer, in the low bits of a bfloat16, is the number byte * 2^-133. Multiplied by 2^127 and less two
    it is (byte - 128) / 64. The bits of an e4m3 float, in the places of sign, low exponent and high mantissa of a
    bfloat16, are the float times 2^-120. Numbers below the normal ones come out right both times.
    """
    word, is_odd = f"${1 + j // 2}", j % 2
    if dtype == jnp.int8:
        pick = f"prmt.b32 a, {word}, 0, 0x4341" if is_odd else f"and.b32 a, {word}, 0x00ff00ff"
        factor, addend = "0x7f007f00", "0xc000c000"  # 2^127 and -2
    else:
        high = f"mov.b32 b, {word}" if is_odd else f"shl.b32 b, {word}, 8"
        pick = f"{high}; shr.u32 a, b, 4; and.b32 a, a, 0x07f007f0; lop3.b32 a, b, 0x80008000, a, 0xea"
        factor, addend = "0x7b807b80", "0x80008000"  # 2^120 and -0
    registers = f".reg .b32 a, b, factor, addend; mov.b32 factor, {factor}; mov.b32 addend, {addend}"
    return f"{{ {registers}; {pick}; fma.rn.bf16x2 $0, a, factor, addend; }}"


def _quarter(words: jax.Array, dtype: Any, j: int) -> jax.Array:
    """Compute quarter j as `unpacked` does, in plain jnp for an interpreted kernel."""
    of_half = words.reshape(len(words), -1, 2)[:, :, j // 2, None]
    byte = (of_half >> (jnp.arange(2) * 16 + 8 * (j % 2)) & 0xFF).astype(jnp.uint8).reshape(words.shape)
    value = lax.bitcast_convert_type(byte, dtype).astype(jnp.bfloat16)
    return value / 64 if dtype == jnp.int8 else value
