"""On GPU: a kernel that lets the next one be put in place, or asks for what that one reads, while it is still at work.

Starting a kernel takes a microsecond, which is much where the kernel takes five. From Hopper on, the next one may start
as soon as all programs of the one before it have asked for it (programmatic dependent launch). XLA begins every kernel
of a program with a wait for what was written before, so that nothing but the time changes. Only for kernels after
which small ones follow: the compiler's large products lose more by coming in between than they gain (see
docs/notes/gpu.md).
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.device import Device


def start_next(numbers: jax.Array, device: Device) -> jax.Array:
    """A kernel's numbers, i32[] or f32[...], unchanged. The next kernel is asked for when they are there, and before
    anything is computed from them."""
    if not device.starts_early:
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


WARPS = 4  # of the kernels that ask for what is read after them


def ask_for(matrix, *, size: int, parts: int, programs: int, now) -> jax.Array:
    """0, once each thread of a kernel, where now bool[], has asked two lines of memory into the L2 cache.

    matrix: a reference to its first number. size: of the matrix, in bytes. parts: into which its product splits the
    depth; all threads of all programs together ask for the first rows of each, which are read first. programs: of the
    kernel's grid, which has two axes.
    """
    part, threads, program = size // parts, 32 * WARPS, pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    share = programs * threads // parts  # threads for a part
    code = (
        "{ .reg .pred now; .reg .b32 thread, part; .reg .b64 at;",
        f"mov.u32 thread, %tid.x; mad.lo.s32 thread, $2, {threads}, thread;",
        f"div.s32 part, thread, {share}; min.s32 part, part, {parts - 1};",
        f"mad.lo.s32 thread, part, -{share}, thread; setp.lt.s32 now, thread, {part // 256};",
        f"mad.wide.s32 at, part, {part}, $1; mad.wide.s32 at, thread, 256, at;",
        "setp.ne.and.s32 now, $3, 0, now;",
        "@now prefetch.global.L2 [at]; @now prefetch.global.L2 [at + 128];",
        "mov.b32 $0, 0; }",
    )
    (zero,) = plgpu.elementwise_inline_asm(
        "\n".join(code),
        args=[matrix, *(jnp.full((1, 1), number, jnp.int32) for number in (program, now))],
        constraints="=r,l,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1, 1), jnp.int32)],
    )
    return jnp.sum(zero)
