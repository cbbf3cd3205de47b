"""Placement of TPU kernels' operands in HBM."""

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.device import Device


def in_hbm(x: jax.Array, device: Device) -> jax.Array:
    """Return x, an operand of a pallas_call inside `jit`, constrained to HBM.

    The memory space `pl.ANY` leaves the choice of memory to the compiler. If the array fits into VMEM, the compiler
    would move all of it there, even for a kernel that reads only a little of the array.
    """
    return x if device.interpret else pltpu.with_memory_space_constraint(x, pltpu.MemorySpace.HBM)
