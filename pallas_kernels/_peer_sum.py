"""GPU kernel for tensor parallelism over two GPUs of one process: sum over both, addition to x, and norm.

Each GPU writes its own sums straight into the other's memory, and waits until the other's have arrived in its own. XLA
would take a kernel of its own for the sum, which breaks the row of kernels that start early (docs/notes/several.md).

A *mailbox* is the memory of one GPU that the other writes to. It has SLOTS places for each row, which the calls use in
turn. A place is EMPTY until the other GPU's numbers arrive, so the numbers themselves say when they are there, and no
flag or fence is needed. Call k empties the place of call k - 1. The other GPU fills that place again in its call k + 2,
and by then it has seen numbers of our call k + 1, which began after call k ended.

So both GPUs must make the same calls with one mailbox in the same order, and each call must depend on the one before.
In a decoder it does: each layer reads the result of the layer before, each pass that of the pass before.

The compiler does not know that the mailbox changes. It must not be copied, and the program takes it as an argument.
"""

import functools
import importlib
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._add_and_norm import normed_results, normed_shapes, row_reads, store_normed
from pallas_kernels._overlap import start_next
from pallas_kernels._split_product import added
from pallas_kernels._tiling import MAX_ROWS
from pallas_kernels._types import Ref
from pallas_kernels.device import Device
from pallas_kernels.forms import lowered_once

SLOTS = 3  # places of a row, used in turn
EMPTY = -4137299  # 0xFFC0DEAD as an integer: the bits of a NaN that no sum has
NAN = 0x7FC00000  # the bits of the usual NaN
# Number of reads after which a call stops waiting. They take some tens of seconds. The other GPU's program may be late
# by seconds, for example while its host thread loads kernels.
POLLS = 1 << 27

# A GPU's own mailbox, i32[mailbox_size]; and the address of the other's, i32[2], the low word first.
Mailbox = tuple[jax.Array, jax.Array]

_send = jax.extend.core.Primitive("send_to_peer")
_send.def_abstract_eval(lambda low, high, at, bits, here: jax.core.ShapedArray(bits.shape, bits.dtype))


def mailbox_size(width: int) -> int:
    """Return the number of i32 elements of a GPU's mailbox for rows of this width.

    First comes the number of the next place of each row, 0 to SLOTS - 1, or less by SLOTS once a call has waited in
    vain. Then come the places [MAX_ROWS, SLOTS, width].
    """
    return MAX_ROWS * (1 + SLOTS * width)


def empty_mailbox(width: int) -> np.ndarray:
    """Return a GPU's mailbox before the first call."""
    mailbox = np.full(mailbox_size(width), EMPTY, np.int32)
    mailbox[:MAX_ROWS] = 0
    return mailbox


def waited_in_vain(mailbox: jax.Array) -> bool:
    """Return whether a call with this mailbox of a GPU has waited in vain, so that a row's results stay NaN."""
    return bool((mailbox[:MAX_ROWS] < 0).any())


def supported(device: Device) -> bool:
    """Return whether the kernel can be compiled for this device by this version of JAX."""
    return device.platform == "gpu" and device.shares_much and _registered()


@lowered_once("eps", "rounded", "summed", "device", "polls")
def sum_and_norm(
    x: jax.Array,
    parts: jax.Array,
    scale: jax.Array,
    eps: float,
    mailbox: Mailbox,
    *,
    rounded: str | None = None,
    summed: bool = False,
    device: Device,
    polls: int = POLLS,
) -> tuple[jax.Array, Any]:
    """Return x + the sum of `parts` over both GPUs, and the RMSNorm of this result. Both GPUs get equal bits.

    If the other GPU's partial sums do not arrive in time, this result and every later result for the row are NaN.

    Args:
      x: [rows, width], at most MAX_ROWS rows; equal on both GPUs.
      parts: f32[splits, rows, width], partial sums of this GPU's part of a product.
      scale: f32[width], scale of the norm.
      eps: epsilon of the norm.
      mailbox: this GPU's mailbox, and the address of the other's.
      rounded: as in `add_and_norm`.
      summed: as in `add_and_norm`.
      device: the device that the program is compiled for.
      polls: number of reads after which the kernel stops waiting.
    """
    rows, width = x.shape
    if rows > MAX_ROWS or mailbox[0].shape != (mailbox_size(width),):
        raise ValueError(f"sum_and_norm: the mailbox {mailbox[0].shape} is not for {rows} rows of {width}")
    if not _registered():
        raise RuntimeError("sum_and_norm: this version of JAX lacks what the kernel needs, see `supported`")
    shapes = normed_shapes(x, rounded, summed)
    result: Any = pl.pallas_call(
        functools.partial(_sum_and_norm, eps=eps, device=device, polls=polls),
        grid=x.shape[:1],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), *jax.tree.leaves(shapes)],
        # At most 32 numbers a thread. More warps than these would be slower (docs/notes/several.md).
        compiler_params=plgpu.CompilerParams(num_warps=max(8, pl.next_power_of_2(width) // 1024), num_stages=1),
        name="sum_and_norm",
    )(x, parts, scale, *mailbox)
    return result[0], normed_results(shapes, result[1:])


def _sum_and_norm(
    x: Ref,
    parts: Ref,
    scale: Ref,
    places: Ref,
    peer: Ref,
    out: Ref,
    *normed: Ref,
    eps: float,
    device: Device,
    polls: int,
) -> None:
    row = start_next(pl.program_id(0), device)
    width = x.shape[1]
    at, here, load = row_reads(width)

    def place(number: jax.Array) -> Any:
        return MAX_ROWS + (row * SLOTS + lax.rem(number, jnp.int32(SLOTS))) * width

    known = plgpu.load(places.at[row])
    lost = known < 0  # an earlier call has waited in vain, so the places of both GPUs may be out of step
    number = jnp.where(lost, known + SLOTS, known)
    mine = place(number)
    low, high = plgpu.load(peer.at[0]), plgpu.load(peer.at[1])
    own = added([load(parts, jnp.int32(part), row) for part in range(parts.shape[0])])
    residual, weight = load(x, row), load(scale)
    bits = lax.bitcast_convert_type(own, jnp.int32)
    bits = _send.bind(low, high, mine + at, jnp.where(bits == EMPTY, jnp.int32(NAN), bits), here)
    plgpu.store(places.at[place(number + (SLOTS - 1)) + at], jnp.full(at.shape, EMPTY, jnp.int32), mask=here)

    def read(state: Any) -> tuple[jax.Array, jax.Array]:
        # A volatile load goes to memory each time.
        return plgpu.load(places.at[mine + at], mask=here, other=0, volatile=True), state[1] + 1

    def wait(state: Any) -> Any:
        return (jnp.max((state[0] == EMPTY).astype(jnp.int32)) > 0) & (state[1] < most)

    most = jnp.where(lost, jnp.int32(0), jnp.int32(polls))
    first = read((None, jnp.int32(0)))
    theirs, reads = lax.while_loop(wait, read, first)
    lost = reads >= most
    plgpu.store(places.at[row], lax.rem(number + 1, jnp.int32(SLOTS)) - jnp.where(lost, jnp.int32(SLOTS), jnp.int32(0)))
    # The sum of two numbers is the same in both orders.
    total = lax.bitcast_convert_type(bits, jnp.float32) + lax.bitcast_convert_type(theirs, jnp.float32)
    total = jnp.where(lost, jnp.float32(jnp.nan), total)
    store_normed((residual + total).astype(out.dtype), weight, row, at, here, out, *normed, eps=eps, device=device)


@functools.cache
def _registered() -> bool:
    """Tell Pallas how to lower `_send`. Return False if this version of JAX has other names for what it takes."""
    try:
        lowering: Any = importlib.import_module("jax._src.pallas.triton.lowering")
        rules, ir, triton, arith = (
            lowering.triton_lowering_rules, lowering.ir, lowering.tt_dialect, lowering.arith_dialect
        )  # fmt: skip
        to_pointer, pointer_type, splat, add, store = (
            triton.int_to_ptr, triton.PointerType, triton.splat, triton.addptr, triton.store
        )  # fmt: skip
    except (ImportError, AttributeError):
        return False

    def lower(context: Any, low: Any, high: Any, at: Any, bits: Any, here: Any) -> Any:
        """Store the numbers `bits` at the elements `at` behind the address. Return the numbers."""
        wide, word = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(32)
        shift = arith.constant(wide, ir.IntegerAttr.get(wide, 32))
        address = arith.ori(arith.shli(arith.extui(wide, high), shift), arith.extui(wide, low))
        base = to_pointer(pointer_type.get(word, 1), address)
        aligned = ir.DenseIntElementsAttr.get(np.array([16], np.int32))  # bytes: four numbers are stored at once
        base.owner.attributes["tt.divisibility"] = aligned
        pointers = splat(ir.RankedTensorType.get(ir.RankedTensorType(bits.type).shape, base.type), base)
        store(add(pointers.type, pointers, at), bits, mask=here)
        return bits

    rules.setdefault(_send, lower)
    return True
