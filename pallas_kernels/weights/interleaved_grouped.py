"""Weight matrices in 4 bits whose inputs are reordered, so that a GPU kernel unpacks two values by two instructions.

The matrix units of a GPU multiply bfloat16, so the 4-bit values have to be converted on their way there. A thread reads
pairs of 32-bit words of eight values. Two values that it converts at the same time must be in the same place of the two
halves of a word, and must belong to neighbouring inputs. `interleaved` brings the inputs into that order.

GGUF's Q4_K has scales in two factors: a float16 for a chunk, and an integer of 6 bits for a group of its inputs. The
kernel computes (value - MIDDLE) * integer while it converts a 4-bit value. bfloat16 holds this number exactly up to
256, and rounds larger ones to 8 bits. So a chunk takes one product of the matrix units. A second product adds what
MIDDLE and the offsets of the groups contribute. It multiplies the integers of scales and offsets with the sums of x
over each group (`Prepared.sums`), which the kernel that computes x can store, too.
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
from pallas_kernels.weights import Prepared
from pallas_kernels.weights.grouped import Grouped, Layout, dequantised_product, finest, packed, unpacked
from pallas_kernels.weights.interleaved import MAX_SIZE, OUTPUTS

CHUNK = 256  # number of inputs that are reordered among each other
PIECES = 8  # number of values of a word, and of parts of a chunk that `pieces` returns
PIECE = CHUNK // PIECES  # number of inputs of such a part; every group has whole parts
DIVISOR = 64  # `pieces` returns values divided by this number, `factored_pieces` values divided by its square
# Numbers in bfloat16, in both halves of a word: factors by which values of the low and of the high four bits of a byte
# become values / 64; and -MIDDLE / 64.
FACTORS, MINUS_MIDDLE = ("0x7f007f00", "0x7d007d00"), "0xbe00be00"  # 2^127 and 2^123
# `scaled_pieces` returns weights divided by this number. It reads a 4-bit value as a bfloat16, which is value * 2^-133,
# and multiplies it by scale * 2^133 / DIVISOR_OF_SCALED. This factor does not overflow for scales below 2^64.
DIVISOR_OF_SCALED = 2.0**69
MIDDLE = 8  # integer that `factored_pieces` subtracts
GROUP = 32  # number of inputs that share the integer factors of their scale and offset
GROUPS = CHUNK // GROUP  # number of these in a chunk
SUMS = 2 * GROUPS  # number of sums of x for each chunk: of each group in two numbers
OF_SUMS = MIDDLE / DIVISOR  # factor of sums, with which integers / DIVISOR give what MIDDLE takes from a product
OF_WORD = 4  # number of integer factors in a word
# The place of each group's integer in two words of integers: the word (0 or 1) in the high half, and in the low half
# the bytes of this integer and its neighbour, as PTX's `prmt` wants their numbers, each behind a 4 for a byte of 0.
PLACES = np.array([(i // OF_WORD << 16) + 0x4140 + 0x101 * (i & 2) for i in range(GROUPS)], np.int32)
FACTORED = (("float16", CHUNK), ("uint8", GROUP))  # factors of a scale, or of an offset, in a layout with two of them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InterleavedGrouped(Grouped):
    """A matrix of 4 bits whose inputs are reordered. Every other property is that of `Grouped`.

    values: a single plane u8[O, I / 2], whose bytes have the order that `interleaved` describes.
    scale: a single factor, so that a kernel reads the scales of neighbouring outputs together: i32[I / inputs / 2, O]
      with those of two groups in a word, the first in the low half, if a chunk has several groups of 16 bits; else
      f32[I / inputs, O]. Or, in a layout with two factors, i32[I / CHUNK, O] with the float16 factors of the scale (low
      half) and of the offset, and i32[I / (GROUP * OF_WORD), O] with the integer factors of OF_WORD groups, from the
      lowest bits to the highest.
    offset: empty, or the integer factors of the offset, as those of the scale.
    zeros: i8[I / inputs, O], or None.
    order: None.
    """

    form: ClassVar[str] = "interleaved_grouped"

    @property
    def factored(self) -> bool:
        """True if the scale has two factors."""
        return len(self.scale) == 2

    @property
    def size_of_groups(self) -> int:
        if self.factored:
            return GROUP
        of_word = 2 if self.scale[0].dtype == jnp.int32 else 1
        return int(self.shape[0]) // self.scale[0].shape[0] // of_word

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        return dequantised_product(x, self, dtype)

    def rows(self) -> jax.Array:
        scale, offset = self.factors()
        groups = int(self.shape[0]) // self.size_of_groups
        offsets = finest(offset, groups) if offset else None
        return self.dequantised(finest(scale, groups), turned(self.zeros), offsets)

    def factors(self) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Return the factors of the scale and those of the offset, as `Grouped` has them."""
        first, dtype = self.scale[0].T, self.layout.scale[0][0]
        if first.dtype != jnp.int32:
            return (first.astype(dtype),), ()
        halves = lax.bitcast_convert_type(first, dtype)
        if not self.factored:
            return (halves.reshape(len(halves), -1),), ()
        words = (lax.bitcast_convert_type(x[0].T, jnp.uint8) for x in (self.scale[1:], self.offset))
        scale, offset = (x.reshape(len(x), -1) for x in words)
        return (halves[:, :, 0], scale), (halves[:, :, 1], offset)

    def arrays(self) -> list[jax.Array]:
        """Return what a kernel reads: the values as words i32[O, I / 8], and what belongs to groups."""
        inputs, outputs = self.shape
        words = lax.bitcast_convert_type(self.values[0].reshape(outputs, inputs // PIECES, 4), jnp.int32)
        order = [jnp.asarray(PLACES)] if self.offset else []
        return [words, *self.scale, *self.offset, *([] if self.zeros is None else [self.zeros]), *order]

    def integers(self) -> jax.Array:
        (plane,) = self.values
        nibbles = jnp.stack([plane & 15, plane >> 4], axis=-1).reshape(len(plane), -1, PIECE // 2, 2, 2, 2, 2)
        return nibbles.transpose(0, 1, 3, 5, 6, 2, 4).reshape(len(plane), -1).astype(jnp.int32)

    def natural(self) -> Grouped:
        values = packed(self.integers().astype(jnp.uint8), (4,))
        return Grouped(values, *self.factors(), turned(self.zeros), None, self.layout, self.computes_in)

    def specs(self, spec: Any) -> Any:
        of_inputs, of_outputs = (*spec, None, None)[:2]

        def place(x: jax.Array) -> Any:
            # A dimension with a single group is replicated, not sharded.
            return P(of_inputs if x.shape[0] > 1 else None, of_outputs)

        values: Any = P(of_outputs, of_inputs)
        scale, offset, zeros = jax.tree.map(place, (self.scale, self.offset, self.zeros))
        return dataclasses.replace(self, values=(values,), scale=scale, offset=offset, zeros=zeros)


def interleaved(weight: Grouped) -> InterleavedGrouped:
    """Return a weight in the form `InterleavedGrouped`.

    The number of an input within its chunk has the bits e, q, p, i (four bits) and h, from the highest to the lowest.
    Its word is 2i + e of the chunk, its byte 2h + q of the word, and its bits are the upper half of the byte if p is 1.
    """
    (plane,) = weight.values
    numbers = unpacked(plane, 4).reshape(len(plane), -1, 2, 2, 2, PIECE // 2, 2)
    nibbles = numbers.transpose(0, 1, 5, 2, 6, 3, 4)
    values = (nibbles[..., 0] | nibbles[..., 1] << 4).reshape(plane.shape)
    first, *integers = weight.scale
    minima, *offset = weight.offset or (None,)
    if minima is not None:
        words = in_words(jnp.stack([first, minima], axis=-1))
    elif weight.size_of_groups < CHUNK and first.dtype.itemsize == 2:
        words = in_words(first.reshape(len(first), -1, 2))
    else:
        words = first.T.astype(jnp.float32)
    scale, of_offset = ([in_words(x.reshape(len(x), -1, OF_WORD)) for x in factors] for factors in (integers, offset))
    zeros = turned(weight.zeros)
    return weight.in_form(
        InterleavedGrouped, values=(values,), scale=(words, *scale), offset=tuple(of_offset), zeros=zeros
    )


def in_words(x: jax.Array) -> jax.Array:
    """Return what words are made of, [O, N, parts of a word], as words i32[N, O]."""
    return lax.bitcast_convert_type(x, jnp.int32).T


def turned(x: jax.Array | None) -> jax.Array | None:
    """Return the transpose of an array; None for None."""
    return None if x is None else x.T


def placed(shardings: Grouped) -> InterleavedGrouped:
    """Return the shardings of the arrays of `interleaved(weight)`. shardings: weight with shardings for its arrays."""

    def of_transpose(sharding: Any) -> Any:
        if not isinstance(sharding, NamedSharding):
            return sharding
        return NamedSharding(sharding.mesh, P(*reversed((*sharding.spec, None, None)[:2])))

    scale, offset = (tuple(of_transpose(x) for x in factors) for factors in (shardings.scale, shardings.offset))
    # The first factor of the scale holds that of the offset, too.
    return shardings.in_form(InterleavedGrouped, scale=scale, offset=offset[1:], zeros=of_transpose(shardings.zeros))


def can_be_interleaved(weight: Grouped, shard: tuple[int, ...]) -> bool:
    """Return whether kernels would read a weight in this form. shard: shape [O, I] of a device's part of the matrix."""
    outputs, inputs = shard
    known = weight.layout.bits == (4,) and has_known_factors(weight.layout) and weight.order is None
    size = weight.size_of_groups
    whole = size % PIECE == 0 and (CHUNK % size == 0 or size % CHUNK == 0)
    divides = inputs % CHUNK == outputs % OUTPUTS == 0
    return known and whole and divides and weight.dtype == jnp.bfloat16 and inputs * outputs < MAX_SIZE


def has_known_factors(layout: Layout) -> bool:
    """Return whether kernels know a layout's factors: a single one and no offset, or two of scale and offset each."""
    if len(layout.scale) == 1:
        return not layout.offset
    return layout.scale == layout.offset == FACTORED and not layout.zero and not layout.has_zeros


def can_be_scaled(layout: Layout) -> bool:
    """Return whether a weight of this layout times its scale in bfloat16 is exactly the dequantised weight."""
    return not layout.offset and layout.scale[0][0] == "bfloat16"


def summed(x: jax.Array) -> Prepared:
    """Return x [..., I] and its sums over groups of GROUP inputs, [..., I / CHUNK * SUMS].

    Each sum is multiplied by OF_SUMS. A chunk has SUMS numbers in bfloat16: the rounded sum of each group, followed by
    the rounding error of each.
    """
    sums = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, GROUPS, GROUP).sum(-1) * OF_SUMS
    high = lax.reduce_precision(sums, exponent_bits=8, mantissa_bits=7)  # XLA would leave a conversion and back out
    both = jnp.concatenate([high, sums - high], axis=-1).astype(jnp.bfloat16)
    return Prepared(x, both.reshape(*x.shape[:-1], -1))


def reads_sums(weight: Any) -> bool:
    """Return whether a kernel's product with a weight reads `Prepared.sums`."""
    return isinstance(weight, InterleavedGrouped) and bool(weight.layout.offset)


def store_sums(sums: Any, row: Any, x: jax.Array, first: Any) -> None:
    """Store the sums of some rows, inside a kernel.

    sums: reference to `Prepared.sums`, [rows, _].
    row: number of the row of x [N], or numbers [R] of the rows of x [N, R].
    x: f32, values of N neighbouring inputs, whole groups.
    first: number of the first of these inputs.
    """
    totals = x.reshape(-1, GROUP, *x.shape[1:]).sum(1) * OF_SUMS
    group = lax.div(jnp.int32(first), jnp.int32(GROUP)) + jnp.arange(len(totals), dtype=jnp.int32)
    to = lax.div(group, jnp.int32(GROUPS)) * SUMS + lax.rem(group, jnp.int32(GROUPS))
    here = group < sums.shape[1] // 2
    if x.ndim > 1:
        to, here, row = to[:, None], here[:, None] & (row < sums.shape[0])[None, :], row[None, :]
    high = totals.astype(jnp.bfloat16)
    for i, part in enumerate((high, (totals - high.astype(jnp.float32)).astype(jnp.bfloat16))):
        plgpu.store(sums.at[row, to + i * GROUPS], part, mask=here)


def divisor(layout: Layout, scaled: bool) -> float:
    """Return the factor by which a kernel has to multiply its sums at the end.

    scaled: whether the weights were multiplied by their scales before the product.
    """
    return DIVISOR_OF_SCALED if scaled else DIVISOR**2 if layout.offset else DIVISOR


def of_groups(x: Any, depth: int, column: jax.Array, first: Any) -> list[jax.Array]:
    """Read what belongs to the groups of a chunk inside a kernel: scales, zeros, or words of them.

    x: reference to all of these, [N, outputs].
    depth: number of the matrix's inputs.
    column: i32[O], the outputs to read.
    first: number of the chunk's first input. The last chunk is read again for a number that is too large.
    Returns: the values [O] of each of them.
    """
    count = x.shape[0]
    size = depth // count
    of_chunk = max(1, CHUNK // size)
    group = jnp.minimum(lax.div(first, jnp.int32(size)), count - of_chunk)
    return [plgpu.load(x.at[group + i, column]) for i in range(of_chunk)]


def read(
    arrays: Any,
    x: Any,
    scales: list[jax.Array],
    column: jax.Array,
    first: jax.Array,
    order: jax.Array | None,
    layout: Layout,
    scaled: bool,
    device: Device,
) -> list[tuple[jax.Array | None, list[tuple[jax.Array, Any, jax.Array]]]]:
    """Read a chunk of a matrix inside a kernel. Return blocks (scales, parts), whose scaled products are added up.

    The scales are f32[O, 1]. A part is (weights [O, N], reference to what they are multiplied with, N places there).
    The weights are too small by the factor `divisor`.

    arrays: references to `InterleavedGrouped.arrays`.
    x: references to x [rows, I], and to `Prepared.sums` for weights with offsets.
    scales: the scales of the chunk, as `of_groups` reads them from arrays[1]. Ignored if `scaled` is True: this
      function then reads them itself.
    column: i32[O], the outputs to read.
    first: number of the chunk's first input.
    order: PLACES for weights with offsets, else None.
    layout: the matrix's layout.
    scaled: whether to scale the weights themselves, which rounds them to bfloat16. The scales of a block are then None.
    """
    words, others = arrays[0], arrays[2:4] if layout.offset else arrays[2:]
    depth = words.shape[1] * PIECES
    word = lax.div(first, jnp.int32(PIECES)) + jnp.arange(PIECE, dtype=jnp.int32)
    of_chunk = plgpu.load(words.at[column[:, None], word[None, :]])
    if scaled:
        # An operand of the matrix units is computed from these loads. So Triton pipelines them: it copies the scales to
        # shared memory some steps ahead.
        scales = of_groups(arrays[1], depth, column, first)
    # These are not read a step ahead, because Triton would then convert weights in shared memory.
    own = [of_groups(other, depth, column, first) for other in others]
    dtype = layout.scale[0][0]
    if scales[0].dtype == jnp.int32:
        scales = [half(pair, i, dtype) for pair in scales for i in range(2)]
    wide = [scale[:, None] for scale in scales]
    if layout.offset:
        assert order is not None
        (part,) = joined(factored_pieces(of_chunk, own[0], device), 1)
        middle, offsets = (integers_of_groups(integers, order, device) for integers in own)
        place = lax.div(first, jnp.int32(CHUNK // SUMS)) + jnp.arange(SUMS, dtype=jnp.int32)
        weights = (part, x[0], first + jnp.arange(CHUNK, dtype=jnp.int32)), (middle, x[1], place)
        return [(wide[0], list(weights)), (wide[1] * (1 / DIVISOR / OF_SUMS), [(offsets, x[1], place)])]
    zeros: list[Any] = [addend(zero[:, None]) for zero in own[0]] if layout.has_zeros else [layout.zero] * len(scales)
    group_of_part = [j * len(scales) // PIECES for j in range(PIECES)]
    zeros = [zeros[i] for i in group_of_part]
    if scaled:
        halves = joined(scaled_pieces(of_chunk, [wide[i] for i in group_of_part], zeros, device), 2)
        place = first + jnp.arange(CHUNK // 2, dtype=jnp.int32)
        return [(None, [(part, x[0], place + i * place.size) for i, part in enumerate(halves)])]
    parts = joined(pieces(of_chunk, zeros, device), len(scales))
    place = jnp.arange(CHUNK // len(scales), dtype=jnp.int32)
    return [
        (scale, [(part, x[0], first + i * place.size + place)])
        for i, (scale, part) in enumerate(zip(wide, parts, strict=True))
    ]


def half(words: jax.Array, i: int, dtype: str) -> jax.Array:
    """Return the low (0) or high (1) halves of words, which are of this dtype, as float32, inside a kernel."""
    if dtype == "bfloat16":
        return lax.bitcast_convert_type(words & -(1 << 16) if i else words << 16, jnp.float32)
    bits = lax.shift_right_logical(words, jnp.int32(16)) if i else words & 0xFFFF
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32)


def joined(parts: list[jax.Array], count: int) -> list[jax.Array]:
    """Join neighbouring parts [O, N] until there are `count`, inside a kernel."""
    while len(parts) > count:
        parts = [_joined(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts


def _joined(a: jax.Array, b: jax.Array) -> jax.Array:
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


def scaled_pieces(words: jax.Array, scales: list[jax.Array], zeros: list[Any], device: Device) -> list[jax.Array]:
    """Return dequantised weights / DIVISOR_OF_SCALED in bfloat16, inside a kernel, as the parts that `pieces` returns.

    words, zeros: as in `pieces`.
    scales: a scale f32[O, 1] for each part. bfloat16 holds its values exactly.
    """
    if device.interpret or not isinstance(zeros[0], int):
        factors = [(scale * (DIVISOR / DIVISOR_OF_SCALED)).astype(jnp.bfloat16) for scale in scales]
        return [piece * x for piece, x in zip(pieces(words, zeros, device), factors, strict=True)]
    found = []
    for j, (scale, zero) in enumerate(zip(scales, zeros, strict=True)):
        of_value = 2.0 ** (129 if j % 2 else 133) / DIVISOR_OF_SCALED  # see `_code`
        less = in_halves(scale * (-zero / DIVISOR_OF_SCALED))
        found.append(_multiplied(words, j, in_halves(scale * of_value), less))
    return found


def factored_pieces(words: jax.Array, integers: list[jax.Array], device: Device) -> list[jax.Array]:
    """Return the parts of each chunk in bfloat16, inside a kernel: (value - MIDDLE) * integer / DIVISOR**2.

    words: i32[O, PIECE], the words of a chunk of each output.
    integers: i32[O], the integer factors of each part, OF_WORD a word.
    Returns: arrays [O, PIECE], the inputs' values of one part after the other.
    """
    if device.interpret:
        each = [_byte(integers[j // OF_WORD][:, None], j % OF_WORD) for j in range(PIECES)]
        return [((_values(words, j) - MIDDLE) * x / DIVISOR**2).astype(jnp.bfloat16) for j, x in enumerate(each)]
    found = []
    for j in range(PIECES):
        factor, addend = (factor_of(integers[j // OF_WORD], j % OF_WORD, x) for x in (FACTORS[j % 2], MINUS_MIDDLE))
        found.append(_multiplied(words, j, factor, addend))
    return found


def _multiplied(words: jax.Array, j: int, factor: jax.Array, addend: jax.Array) -> jax.Array:
    """Return factor * value + addend in bfloat16 [O, PIECE], inside a kernel.

    The values are the 4 bits of part j, read as a bfloat16 (see `_code`).

    words: i32[O, PIECE], the words of a chunk of each output.
    factor, addend: i32[O, 1], a bfloat16 for each output, which both halves of the word hold.
    """
    (piece,) = plgpu.elementwise_inline_asm(
        f"{{ .reg .b32 a; {_pick(j)}; fma.rn.bf16x2 $0, a, $3, $5; }}",
        args=[words, *(jnp.broadcast_to(x, words.shape) for x in (factor, addend))],
        constraints="=r,r,r,r,r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )
    return piece


def order(arrays: Any) -> jax.Array:
    """Read PLACES inside a kernel. Numbers that no array holds Triton would take to shared memory.

    arrays: references to `InterleavedGrouped.arrays`.
    """
    return plgpu.load(arrays[-1].at[jnp.arange(GROUPS, dtype=jnp.int32)])


def integers_of_groups(words: list[jax.Array], order: jax.Array, device: Device) -> jax.Array:
    """Return the integers / DIVISOR of a chunk's groups, twice: bfloat16 [O, SUMS], inside a kernel.

    words: i32[O], OF_WORD integers of 6 bits each.
    order: PLACES.
    """
    places = jnp.broadcast_to(order[None, :], (len(words[0]), GROUPS))
    first, second = (jnp.broadcast_to(x[:, None], places.shape) for x in words)
    word = jnp.where(places < 1 << 16, first, second)
    if device.interpret:
        found = (_byte(word, jnp.arange(GROUPS) % OF_WORD) / DIVISOR).astype(jnp.bfloat16)
    else:
        (found,) = plgpu.elementwise_inline_asm(
            f"{{ {_TAKE.format('$3')} fma.rn.bf16x2 $0, a, large, zero; }}",
            args=[word, places],
            constraints="=r,r,r,r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(word.shape, jnp.bfloat16)],
        )
    return _joined(found, found)


def factor_of(integers: jax.Array, i: int, times: str) -> jax.Array:
    """Return integer / 64 times a number, in bfloat16 in both halves of an i32[O, 1], inside a kernel.

    integers: i32[O], OF_WORD integers of 6 bits a word, of which the one in byte i is taken.
    times: the number, in bfloat16 in both halves of a word.
    """
    code = f"mov.b32 times, {times}; fma.rn.bf16x2 a, a, large, zero; fma.rn.bf16x2 $0, a, times, zero;"
    (factor,) = plgpu.elementwise_inline_asm(
        f"{{ .reg .b32 times; {_TAKE.format(f'0x4{i}4{i}')} {code} }}",
        args=[integers[:, None]],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((len(integers), 1), jnp.int32)],
    )
    return factor


# Instructions that take two bytes of the word $1 to the halves of a register. The field has the numbers of both bytes,
# each below a 4, which stands for a byte of 0. As bfloat16 such a half is the byte * 2^-133.
_TAKE = f".reg .b32 a, zero, large; mov.b32 zero, 0x80008000; mov.b32 large, {FACTORS[0]}; prmt.b32 a, $1, 0, {{}};"


def addend(zero: jax.Array) -> jax.Array:
    """Return -zero / DIVISOR as `in_halves` does, inside a kernel."""
    return in_halves(zero.astype(jnp.float32) * (-1 / DIVISOR))


def in_halves(x: jax.Array) -> jax.Array:
    """Return x as bfloat16 in the low and again in the high half of an i32, inside a kernel.

    x: f32, numbers that bfloat16 holds exactly.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits | lax.shift_right_logical(bits, jnp.int32(16))


def _code(j: int, zero: int | None) -> str:
    """Return the instructions that convert two values of part j, of the words $1 and $2, to bfloat16.

    Four bits in the low byte of a bfloat16 are the number value * 2^-133, or value * 2^-129. Multiplied by 2^127 or
    2^123 it is value / 64. The addend subtracts zero / 64; it is $3 if the zero is None.
    """
    subtracted = "$3" if zero is None else hex((np.float32(-zero / DIVISOR).view(np.uint32) >> 16) * 0x10001)
    registers = f".reg .b32 a, factor, addend; mov.b32 factor, {FACTORS[j % 2]}; mov.b32 addend, {subtracted}"
    return f"{{ {registers}; {_pick(j)}; fma.rn.bf16x2 $0, a, factor, addend; }}"


def _pick(j: int) -> str:
    """Return the instructions that take two values of part j, of the words $1 and $2, to the register a."""
    word, shift, mask = f"${1 + j // 4}", 8 * (j // 2 % 2), "0x00f000f0" if j % 2 else "0x000f000f"
    return f"shr.u32 a, {word}, {shift}; and.b32 a, a, {mask}" if shift else f"and.b32 a, {word}, {mask}"


def _piece(words: jax.Array, zero: Any, j: int) -> jax.Array:
    """Compute part j as `pieces` does, in plain jnp for an interpreted kernel."""
    values = _values(words, j)
    if isinstance(zero, int):
        return (values / DIVISOR - zero / DIVISOR).astype(jnp.bfloat16)
    return (values / DIVISOR + lax.bitcast_convert_type(zero & -(1 << 16), jnp.float32)).astype(jnp.bfloat16)


def _values(words: jax.Array, j: int) -> jax.Array:
    """Return the integers of part j in plain jnp."""
    of_pair = words.reshape(len(words), -1, 2)[:, :, j // 4, None]
    return (of_pair >> (16 * jnp.arange(2) + 4 * (j % 4)) & 15).reshape(words.shape)


def _byte(words: jax.Array, i: Any) -> jax.Array:
    """Return byte i of words as float32 in plain jnp."""
    return (lax.shift_right_logical(words, jnp.broadcast_to(jnp.int32(8 * i), words.shape)) & 0xFF).astype(jnp.float32)
