"""What the device can do at best: the bandwidth and the arithmetic that floors are computed from.

Of several runs the fastest counts: a limit that a busy moment lowered would be none.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.bench.clock import measure
from pallas_kernels.plain import matmul_precision

REPEATS = 4  # inside one program or one wait, so that launching it does not count


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a device can do at best, measured.

    copy_gb_s: bytes read + written a second by a large copy.
    read_gb_s: bytes read by a large reduction, measured on CPU only.
    peak_tflops: of a large matrix product in the compute dtype.
    """

    copy_gb_s: float
    read_gb_s: float | None
    peak_tflops: float

    @property
    def floor_gb_s(self) -> float:
        """What a pass could read at. A CPU's copy writes to memory that it has to read first: there it is the read."""
        return self.read_gb_s or self.copy_gb_s

    def bytes_ms(self, count: float) -> float:
        return count / self.floor_gb_s / 1e6

    def flop_ms(self, count: float) -> float:
        return count / self.peak_tflops / 1e9


def hardware(dtype: Any, *, launches: int = 20, megabytes: int = 1024, side: int | None = None) -> Hardware:
    """Measures the first device. megabytes: of the array that is copied; side: of the square matrices."""
    cpu = jax.default_backend() == "cpu"
    count = megabytes << 18  # float32 elements: more than any cache holds
    return Hardware(
        copy_gb_s=copy_bandwidth(count, launches),
        read_gb_s=read_bandwidth(count, launches) if cpu else None,
        peak_tflops=matrix_peak(jnp.dtype(dtype), side or (1024 if cpu else 8192), launches),
    )


def copy_bandwidth(count: int, launches: int) -> float:
    """GB/s, read + written. Two buffers change roles, so that no fresh memory is touched."""

    @functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
    def copy(source, target):
        return jnp.copy(source)

    buffers = [jnp.ones(count, jnp.float32), jnp.zeros(count, jnp.float32)]

    def several() -> Any:
        for _ in range(REPEATS):
            buffers[:] = [copy(*buffers), buffers[0]]
        return buffers[0]

    return 2 * 4 * count * REPEATS / measure(several, launches).best / 1e6


def read_bandwidth(count: int, launches: int) -> float:
    """GB/s of a sum over rows."""
    rows = jnp.ones((count // 4096, 4096), jnp.float32)
    total = jax.jit(lambda x: x.sum(axis=1))
    return 4 * rows.size / measure(lambda: total(rows), launches).best / 1e6


def matrix_peak(dtype: Any, side: int, launches: int) -> float:
    """TFLOP/s of square products, each fed to the next."""
    square = (jax.random.normal(jax.random.key(0), (side, side)) * side**-0.5).astype(
        dtype
    )  # constants cost less power

    @jax.jit
    def chain(x):
        product = lambda _, x: jnp.matmul(x, square, precision=matmul_precision(dtype), preferred_element_type=dtype)
        return jax.lax.fori_loop(0, REPEATS, product, x)

    return 2 * side**3 * REPEATS / measure(lambda: chain(square), launches).best / 1e9
