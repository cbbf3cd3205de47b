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

HOPPER = 9  # compute capability


def start_next(program_id: jax.Array, interpret: bool) -> jax.Array:
    """program_id i32[] of a kernel, unchanged. Before anything is computed from it, the next kernel is asked for."""
    if interpret or not available():
        return program_id
    (same,) = plgpu.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        args=[jnp.full((1,), program_id)],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
    )
    return jnp.sum(same)


def available() -> bool:
    """Whether the GPUs of this machine can do so. A program for one that is not here does without."""
    major, _, _ = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")
    return major.isdigit() and int(major) >= HOPPER
