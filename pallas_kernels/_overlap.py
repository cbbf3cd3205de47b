"""On GPU: a kernel that lets the next one be put in place while it is still at work.

Starting a kernel takes a microsecond, which is much where the kernel takes five. From Hopper on, the next one may start
as soon as all programs of the one in front have asked for it (programmatic dependent launch). XLA begins every kernel
of a program with a wait for what was written before, so that nothing but the time changes. Only for kernels behind
which small ones follow: the compiler's large products lose more by coming in between than they gain (see
jaxspec/bench/NOTES.md).
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import _device


def start_next(numbers: jax.Array, interpret: bool) -> jax.Array:
    """A kernel's numbers, i32[] or f32[...], unchanged. The next kernel is asked for when they are there, and before
    anything is computed from them."""
    if interpret or not _device.starts_early():
        return numbers
    kind = "f" if numbers.dtype == jnp.float32 else "r"
    (same,) = plgpu.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        args=[numbers if numbers.shape else jnp.full((1,), numbers)],
        constraints=f"={kind},{kind}",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(numbers.shape or (1,), numbers.dtype)],
    )
    return same if numbers.shape else jnp.sum(same)
