"""Functions with which a running GPU kernel lets the next kernel start early, or prefetches the next kernel's weights.

Starting a kernel takes a microsecond, which is much for a kernel that takes five. On Hopper and later GPUs, the next
kernel may start as soon as all thread blocks of the running kernel have allowed it (CUDA's programmatic dependent
launch). XLA makes every kernel wait for all earlier writes first, so that only the time changes, never a result. Use
an early start only in kernels that small kernels follow: XLA's large products lose more by an early start than they
gain (see docs/notes/gpu.md).
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._types import Ref
from pallas_kernels.device import Device


def start_next(values: jax.Array, device: Device) -> jax.Array:
    """Allow the next kernel to start. Return `values` unchanged.

    The next kernel may start once `values`, i32[] or f32[...] of this kernel, are computed. The caller goes on with the
    returned values, so that the permission comes before anything that is computed from them.
    """
    if not device.starts_early:
        return values
    kind = "f" if values.dtype == jnp.float32 else "r"
    (same,) = plgpu.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        args=[values if values.shape else jnp.full((1,), values)],
        constraints=f"={kind},{kind}",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values.shape or (1,), values.dtype)],
    )
    return same if values.shape else jnp.sum(same)


WARPS = 4  # number of warps of a program (block of the grid) in the kernels that call `prefetch`


def prefetch(
    matrix: Ref, *, parts: int, apart: int, pairs: int, stride: int, programs: int, now: jax.Array
) -> jax.Array:
    """Prefetch first rows of the next kernel's weight matrix into the L2 cache.

    Each thread prefetches a pair of lines, 256 bytes of memory, unless the part has no more. All threads of all
    programs (blocks of the grid) together prefetch the first pairs of each part of the matrix, which the next kernel
    reads first. The result is 0. The caller must add it to its own result, so that the compiler keeps the prefetch.

    Args:
      matrix: reference to the first element of the matrix.
      parts: number of parts into which the next kernel splits the matrix's rows.
      apart: number of bytes from the beginning of a part to the next part's.
      pairs: number of pairs of lines in a part.
      stride: number of bytes from the beginning of a pair to the next pair's.
      programs: number of programs of this kernel, whose grid has two axes.
      now: bool[]; False to prefetch nothing.
    """
    threads = 32 * WARPS
    program = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    share = programs * threads // parts  # number of threads that prefetch one part of the matrix
    code = (
        "{ .reg .pred now; .reg .b32 thread, part; .reg .b64 at;",
        f"mov.u32 thread, %tid.x; mad.lo.s32 thread, $2, {threads}, thread;",
        f"div.s32 part, thread, {share}; min.s32 part, part, {parts - 1};",
        f"mad.lo.s32 thread, part, -{share}, thread; setp.lt.s32 now, thread, {pairs};",
        f"mad.wide.s32 at, part, {apart}, $1; mad.wide.s32 at, thread, {stride}, at;",
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
