"""Operands of TPU kernels that stay in HBM."""

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.device import Device


def in_hbm(x: jax.Array, device: Device) -> jax.Array:
    """x, an operand of a pallas_call inside `jit`, kept in HBM.

    Left the choice (`pl.ANY`), the compiler moves all of an array that fits to VMEM for a kernel that reads a little.
    """
    return x if device.interpret else pltpu.with_memory_space_constraint(x, pltpu.MemorySpace.HBM)
