"""The op scale_write on TPU, in place: the scales of a page are fetched, changed, and written back as one row.

Tokens of one page follow each other, so each page is fetched once for all of them. All copies of a block of tokens are
under way at the same time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._hbm import in_hbm
from pallas_kernels._types import Ref
from pallas_kernels.device import Device

BLOCK = 64  # number of tokens of a program
LANES = 128  # lanes of a vector register


def fits(scales: jax.Array, *_: Any, **options: Any) -> bool:
    """Return whether the kernel supports these arguments."""
    return scales.shape[2] % LANES == 0


@functools.partial(jax.jit, static_argnames="device")
def scale_write(scales: jax.Array, new: jax.Array, slots: jax.Array, *, device: Device) -> jax.Array:
    """Write new[i] to the slot slots[i] of the pages' scales, in place."""
    p, _, width = scales.shape
    m, heads = new.shape
    size = width // heads
    extra = -m % BLOCK
    slots = jnp.pad(slots, (0, extra), constant_values=p * size)
    # Each new scale is repeated for all slots of a page, so that a comparison of lanes selects its place.
    rows = jnp.repeat(jnp.pad(new, ((0, extra), (0, 0))), size, axis=1)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    result: jax.Array = pl.pallas_call(
        functools.partial(_kernel, size=size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=((m + extra) // BLOCK,),
            in_specs=[pl.BlockSpec((BLOCK, width), lambda block, *_: (block, 0)), anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.VMEM((BLOCK, 1, width), scales.dtype), pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(scales.shape, scales.dtype),
        input_output_aliases={2: 0},  # operand 2 is `scales`, since the prefetched `slots` are operand 0
        interpret=device.interpret,
        name="scale_write",
    )(slots, rows, in_hbm(scales, device))
    return result


def _kernel(slots: Ref, new: Ref, _: Ref, scales: Ref, rows: Ref, semaphore: Ref, *, size: int) -> None:
    first, num_pages = pl.program_id(0) * BLOCK, scales.shape[0]

    def each_page(act: Callable[[jax.Array, jax.Array], None]) -> None:
        """Call act(page, index) for each page of this block's tokens. index: number of pages before it."""
        each_token(lambda i, page, index, starts: pl.when(starts)(lambda: act(page, index)))

    def each_token(act: Callable[..., Any]) -> None:
        """Call act(token, page, index of the page, whether it is the page's first token) for each written token."""

        def step(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            last, index = state
            slot = slots[first + i]
            live = (slot >= 0) & (slot < num_pages * size)
            page = jnp.where(live, slot // size, last)
            starts = live & (page != last)
            index = index + starts.astype(jnp.int32)
            pl.when(live)(lambda: act(i, page, index, starts))
            return page, index

        lax.fori_loop(0, BLOCK, step, (jnp.int32(-1), jnp.int32(-1)))

    def fetch(page: jax.Array, index: jax.Array) -> Any:
        return pltpu.make_async_copy(scales.at[page], rows.at[index], semaphore)

    def store(page: jax.Array, index: jax.Array) -> Any:
        return pltpu.make_async_copy(rows.at[index], scales.at[page], semaphore)

    def change(i: jax.Array, page: jax.Array, index: jax.Array, starts: jax.Array) -> None:
        lane = lax.broadcasted_iota(jnp.int32, (1, rows.shape[2]), 1)
        here = lane % size == slots[first + i] % size
        rows[index] = jnp.where(here, new[pl.ds(i, 1), :], rows[index])

    each_page(lambda *at: fetch(*at).start())
    each_page(lambda *at: fetch(*at).wait())
    each_token(change)
    each_page(lambda *at: store(*at).start())
    each_page(lambda *at: store(*at).wait())
