"""Measured limits of the device, memory bandwidth and arithmetic, from which the least possible times are computed.

The fastest of several runs counts, because a slower one was disturbed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.bench.clock import measure
from pallas_kernels.plain import matmul_precision

REPEATS = 4  # number of copies per wait for the device, and of matrix products per program: starting costs little


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Measured limits of a device.

    copy_gb_s: GB/s of a large copy, with both reading and writing counted.
    read_gb_s: GB/s of reading in a large reduction; None except on CPU.
    peak_tflops: TFLOP/s of a large matrix product in the compute dtype.
    """

    copy_gb_s: float
    read_gb_s: float | None
    peak_tflops: float

    @property
    def floor_gb_s(self) -> float:
        """Bandwidth in GB/s for the least possible times: that of a copy, but on CPU that of reading.

        A copy on CPU also reads the memory that it writes, so that its figure is too low.
        """
        return self.read_gb_s or self.copy_gb_s

    def bytes_ms(self, count: float) -> float:
        """Return the least possible time to read `count` bytes, in milliseconds."""
        return count / self.floor_gb_s / 1e6

    def flop_ms(self, count: float) -> float:
        """Return the least possible time of `count` floating-point operations, in milliseconds."""
        return count / self.peak_tflops / 1e9


def hardware(dtype: Any, *, launches: int = 20, megabytes: int = 1024, side: int | None = None) -> Hardware:
    """Measure the limits of the first device.

    dtype: dtype of the matrix product. launches: number of timed runs.
    megabytes: size of the copied array; side: rows of the square matrices, None for the platform's default.
    """
    cpu = jax.default_backend() == "cpu"
    count = megabytes << 18  # number of float32 elements, by default more than any processor's cache holds
    return Hardware(
        copy_gb_s=copy_bandwidth(count, launches),
        read_gb_s=read_bandwidth(count, launches) if cpu else None,
        peak_tflops=matrix_peak(jnp.dtype(dtype), side or (1024 if cpu else 8192), launches),
    )


def copy_bandwidth(count: int, launches: int) -> float:
    """Return the GB/s of a copy of `count` float32 numbers, with both reading and writing counted.

    Two buffers take turns as source and target, so that no new memory is allocated.
    """

    @functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
    def copy(source: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.copy(source)

    buffers = [jnp.ones(count, jnp.float32), jnp.zeros(count, jnp.float32)]

    def several() -> Any:
        for _ in range(REPEATS):
            buffers[:] = [copy(*buffers), buffers[0]]
        return buffers[0]

    return 2 * 4 * count * REPEATS / measure(several, launches).best / 1e6


def read_bandwidth(count: int, launches: int) -> float:
    """Return the GB/s at which `count` float32 numbers are read while each row of a matrix is summed."""
    rows = jnp.ones((count // 4096, 4096), jnp.float32)

    @jax.jit
    def total(x: jax.Array) -> jax.Array:
        return x.sum(axis=1)

    return 4 * rows.size / measure(lambda: total(rows), launches).best / 1e6


def matrix_peak(dtype: Any, side: int, launches: int) -> float:
    """Return the TFLOP/s of square matrix products, each of which takes the result of the one before."""
    # The matrix is random, because a product of constants takes less power and runs faster.
    square = (jax.random.normal(jax.random.key(0), (side, side)) * side**-0.5).astype(dtype)

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        def product(_: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.matmul(x, square, precision=matmul_precision(dtype), preferred_element_type=dtype)

        last: jax.Array = jax.lax.fori_loop(0, REPEATS, product, x)
        return last

    return 2 * side**3 * REPEATS / measure(lambda: chain(square), launches).best / 1e9
