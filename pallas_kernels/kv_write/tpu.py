"""The op kv_write on TPU: one asynchronous copy from HBM to HBM for each token, in place."""

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

IN_FLIGHT = 64  # number of copies that are started before the first is waited for


@functools.partial(jax.jit, static_argnames="device")
def kv_write(pages: jax.Array, kv: jax.Array, slots: jax.Array, *, device: Device) -> jax.Array:
    """Copy kv[i] to the slot slots[i] of the pages, in place."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    result: jax.Array = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={2: 0},  # operand 2 is `pages`, since the prefetched `slots` are operand 0
        interpret=device.interpret,
        name="kv_write",
    )(slots, kv, in_hbm(pages, device))
    return result


def _kernel(slots: Ref, kv: Ref, _: Ref, pages: Ref, semaphore: Ref) -> None:
    (m,), (p, s, *_) = slots.shape, pages.shape

    def if_live(i: jax.Array, act: Callable[[Any], None]) -> None:
        slot = slots[jnp.clip(i, 0, m - 1)]

        @pl.when((i >= 0) & (i < m) & (slot >= 0) & (slot < p * s))
        def _() -> None:
            act(pltpu.make_async_copy(kv.at[i], pages.at[slot // s, slot % s], semaphore))

    def step(i: jax.Array, _: None) -> None:
        # One semaphore counts all copies. They are equally large, so it does not matter which of them has arrived.
        if_live(i - IN_FLIGHT, lambda copy: copy.wait())
        if_live(i, lambda copy: copy.start())

    lax.fori_loop(0, m + IN_FLIGHT, step, None)
