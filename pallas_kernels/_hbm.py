"""Operands of TPU kernels that stay in HBM."""

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.device import Device


def in_hbm(x: jax.Array, device: Device) -> jax.Array:
    """Return x, an operand of a pallas_call inside `jit`, constrained to HBM.

    `pl.ANY` leaves the choice to the compiler. For a kernel that reads a little of an array, it would move the whole
    array to VMEM if it fits.
    """
    return x if device.interpret else pltpu.with_memory_space_constraint(x, pltpu.MemorySpace.HBM)
