"""Weight matrices in 4 bits whose inputs are reordered, so that a GPU kernel unpacks two values by two instructions.

The matrix units of a GPU multiply bfloat16, so the 4-bit values have to be converted on their way there. A thread reads
pairs of 32-bit words of eight values. Two values that it converts at the same time must be in the same place of the two
halves of a word, and must belong to neighbouring inputs. `interleaved` brings the inputs into that order.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.device import Device
from pallas_kernels.weights.grouped import Grouped, dequantised_product, packed, unpacked
from pallas_kernels.weights.interleaved import MAX_SIZE, OUTPUTS

CHUNK = 256  # number of inputs that are reordered among each other
PIECES = 8  # number of values of a word, and of parts of a chunk that `pieces` returns
PIECE = CHUNK // PIECES  # number of inputs of such a part; every group has whole parts
DIVISOR = 64  # `pieces` returns values divided by this number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InterleavedGrouped(Grouped):
    """A matrix of 4 bits whose inputs are reordered. Every other property is that of `Grouped`.

    values: a single plane u8[O, I / 2], whose bytes have the order that `interleaved` describes.
    scale: a single factor [I / inputs, O], so that a kernel reads the scales of neighbouring outputs together.
    offset: empty.
    zeros: i8[I / inputs, O], or None.
    order: None.
    """

    form: ClassVar[str] = "interleaved_grouped"

    @property
    def size_of_groups(self) -> int:
        return int(self.shape[0]) // self.scale[0].shape[0]

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        return dequantised_product(x, self, dtype)

    def rows(self) -> jax.Array:
        return self.dequantised(self.scale[0].T.astype(jnp.float32), turned(self.zeros), None)

    def integers(self) -> jax.Array:
        (plane,) = self.values
        nibbles = jnp.stack([plane & 15, plane >> 4], axis=-1).reshape(len(plane), -1, PIECE // 2, 2, 2, 2, 2)
        return nibbles.transpose(0, 1, 3, 5, 6, 2, 4).reshape(len(plane), -1).astype(jnp.int32)

    def natural(self) -> Grouped:
        values = packed(self.integers().astype(jnp.uint8), (4,))
        return Grouped(values, (self.scale[0].T,), (), turned(self.zeros), None, self.layout, self.computes_in)

    def specs(self, spec: Any) -> Any:
        of_inputs, of_outputs = (*spec, None, None)[:2]
        # A dimension with a single group is replicated, not sharded.
        of_groups: Any = P(of_inputs if self.scale[0].shape[0] > 1 else None, of_outputs)
        values: Any = P(of_outputs, of_inputs)
        zeros = None if self.zeros is None else of_groups
        return dataclasses.replace(self, values=(values,), scale=(of_groups,), zeros=zeros)


def interleaved(weight: Grouped) -> InterleavedGrouped:
    """Return a weight in the form `InterleavedGrouped`.

    The number of an input within its chunk has the bits e, q, p, i (four bits) and h, from the highest to the lowest.
    Its word is 2i + e of the chunk, its byte 2h + q of the word, and its bits are the upper half of the byte if p is 1.
    """
    (plane,) = weight.values
    numbers = unpacked(plane, 4).reshape(len(plane), -1, 2, 2, 2, PIECE // 2, 2)
    nibbles = numbers.transpose(0, 1, 5, 2, 6, 3, 4)
    values = (nibbles[..., 0] | nibbles[..., 1] << 4).reshape(plane.shape)
    scale, zeros = (weight.scale[0].T,), turned(weight.zeros)
    return weight.in_form(InterleavedGrouped, values=(values,), scale=scale, zeros=zeros)


def turned(x: jax.Array | None) -> jax.Array | None:
    """Return the transpose of an array; None for None."""
    return None if x is None else x.T


def placed(shardings: Grouped) -> InterleavedGrouped:
    """Return the shardings of the arrays of `interleaved(weight)`. shardings: weight with shardings for its arrays."""

    def of_transpose(sharding: Any) -> Any:
        if not isinstance(sharding, NamedSharding):
            return sharding
        return NamedSharding(sharding.mesh, P(*reversed((*sharding.spec, None, None)[:2])))

    scale, zeros = (of_transpose(shardings.scale[0]),), of_transpose(shardings.zeros)
    return shardings.in_form(InterleavedGrouped, scale=scale, zeros=zeros)


def can_be_interleaved(weight: Grouped, shard: tuple[int, ...]) -> bool:
    """Return whether kernels would read a weight in this form. shard: shape [O, I] of a device's part of the matrix."""
    outputs, inputs = shard
    known = weight.layout.bits == (4,) and len(weight.scale) == 1 and not weight.offset and weight.order is None
    size = weight.size_of_groups
    whole = size % PIECE == 0 and (CHUNK % size == 0 or size % CHUNK == 0)
    divides = inputs % CHUNK == outputs % OUTPUTS == 0
    return known and whole and divides and weight.dtype == jnp.bfloat16 and inputs * outputs < MAX_SIZE


def of_groups(x: Any, depth: int, column: jax.Array, first: Any) -> list[jax.Array]:
    """Read the scales or zeros [O] of each group of a chunk inside a kernel.

    x: reference to the scales or zeros of all groups, [I / inputs, _].
    depth: number of inputs of the matrix.
    column: i32[O], the outputs to read.
    first: number of the chunk's first input. If it is beyond the matrix, the last groups are read instead.
    """
    groups = x.shape[0]
    size = depth // groups
    of_chunk = max(1, CHUNK // size)
    group = jnp.minimum(lax.div(first, jnp.int32(size)), groups - of_chunk)
    return [plgpu.load(x.at[group + i, column]) for i in range(of_chunk)]


def read(
    words: Any, scales: list[jax.Array], zeros: Any, column: jax.Array, first: jax.Array, device: Device
) -> list[tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]]:
    """Read a chunk of a matrix inside a kernel. Return a pair (scales, parts) for each group of the chunk.

    The scales are f32[O, 1]. There is one part, (weights [O, inputs], the numbers of their inputs). Its weights are
    divided by DIVISOR.

    words: reference to the matrix's words i32[_, I / 8].
    scales: the scales of the chunk, as `of_groups` returns them.
    zeros: reference to the zeros of all groups; an integer if all groups have this one.
    column: i32[O], the outputs to read.
    first: number of the chunk's first input.
    """
    word = lax.div(first, jnp.int32(PIECES)) + jnp.arange(PIECE, dtype=jnp.int32)
    of_chunk = plgpu.load(words.at[column[:, None], word[None, :]])
    own: list[Any] = [zeros] * len(scales)
    if not isinstance(zeros, int):  # not read a step ahead, because Triton would then convert weights in shared memory
        own = [addend(zero[:, None]) for zero in of_groups(zeros, words.shape[1] * PIECES, column, first)]
    parts = pieces(of_chunk, [own[j * len(scales) // PIECES] for j in range(PIECES)], device)
    while len(parts) > len(scales):
        parts = [joined(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    place = jnp.arange(CHUNK // len(scales), dtype=jnp.int32)
    return [
        (scale.astype(jnp.float32)[:, None], [(part, first + i * place.size + place)])
        for i, (scale, part) in enumerate(zip(scales, parts, strict=True))
    ]


def joined(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return [O, 2N], the columns of a and then those of b, [O, N] both, inside a kernel. No value moves for that."""
    both = jnp.concatenate([a[:, :, None], b[:, :, None]], axis=2)
    return both.transpose(0, 2, 1).reshape(len(a), -1)


def pieces(words: jax.Array, zeros: list[Any], device: Device) -> list[jax.Array]:
    """Return the parts of each chunk in bfloat16, inside a kernel: the value less its zero, divided by DIVISOR.

    words: i32[O, PIECE], the words of a chunk of each output.
    zeros: for each part the integer for 0, or i32[O, 1], the result of `addend` for the integer of each output.
    Returns: arrays [O, PIECE], the inputs' values of one part after the other.
    """
    if device.interpret:
        return [_piece(words, zero, j) for j, zero in enumerate(zeros)]
    found = []
    for j, zero in enumerate(zeros):
        own = [] if isinstance(zero, int) else [jnp.broadcast_to(zero, words.shape)]
        (piece,) = plgpu.elementwise_inline_asm(
            _code(j, zero if isinstance(zero, int) else None),
            args=[words, *own],
            constraints="=r,r,r,r,r" if own else "=r,r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
        )
        found.append(piece)
    return found


def addend(zero: jax.Array) -> jax.Array:
    """Return the bits of -zero / DIVISOR in bfloat16, in both halves of an i32, inside a kernel."""
    bits = lax.bitcast_convert_type(zero.astype(jnp.float32) * (-1 / DIVISOR), jnp.int32)
    return bits | lax.shift_right_logical(bits, jnp.int32(16))


def _code(j: int, zero: int | None) -> str:
    """Return the instructions that convert two values of part j, of the words $1 and $2, to bfloat16.

    Four bits in the low byte of a bfloat16 are the number value * 2^-133, or value * 2^-129. Multiplied by 2^127 or
    2^123 it is value / 64. The addend subtracts zero / 64; it is $3 if the zero is None.
    """
    word, shift, high = f"${1 + j // 4}", 8 * (j // 2 % 2), j % 2
    mask, factor = ("0x00f000f0", "0x7d007d00") if high else ("0x000f000f", "0x7f007f00")
    subtracted = "$3" if zero is None else hex((np.float32(-zero / DIVISOR).view(np.uint32) >> 16) * 0x10001)
    pick = f"shr.u32 a, {word}, {shift}; and.b32 a, a, {mask}" if shift else f"and.b32 a, {word}, {mask}"
    registers = f".reg .b32 a, factor, addend; mov.b32 factor, {factor}; mov.b32 addend, {subtracted}"
    return f"{{ {registers}; {pick}; fma.rn.bf16x2 $0, a, factor, addend; }}"


def _piece(words: jax.Array, zero: Any, j: int) -> jax.Array:
    """Compute part j as `pieces` does, in plain jnp for an interpreted kernel."""
    of_pair = words.reshape(len(words), -1, 2)[:, :, j // 4, None]
    values = (of_pair >> (16 * jnp.arange(2) + 4 * (j % 4)) & 15).reshape(words.shape)
    if isinstance(zero, int):
        return (values / DIVISOR - zero / DIVISOR).astype(jnp.bfloat16)
    return (values / DIVISOR + lax.bitcast_convert_type(zero & -(1 << 16), jnp.float32)).astype(jnp.bfloat16)
