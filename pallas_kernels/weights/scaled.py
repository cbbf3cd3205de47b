"""Weight matrices in 8 bits: integers or e4m3 floats, with a scale for each block of the matrix."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels import plain, streamed
from pallas_kernels._round_rows import round_rows
from pallas_kernels.device import Device
from pallas_kernels.weights import LARGEST, TINY, Weight

FEW_ROWS = 96  # largest number of rows of x for which a TPU sums over blocks; for more it dequantises the matrix
UNROLL = 4  # blocks of a step of that loop


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled(Weight):
    """A weight matrix of 8-bit values times scales, one scale for each block of BO outputs and BI inputs.

    Values are stored output-first, as in checkpoints, because a GPU's matrix units take converted values from registers
    only if they are contiguous along the inputs.

    values: [O, I], int8 or float8_e4m3fn.
    scale: f32[O / BO, I / BI]. If BI = I and BO = 1, each output has a scale. If BI = I and BO = O, there is only one
      scale.
    computes_in: dtype of the activations, and of the dequantised matrix.
    activations: dtype to which activations are rounded for the product, each row with its own scale (`rounded_rows`);
      None to use them as they are. Only for matrices for which `by_output` is True.
    """

    form: ClassVar[str] = "scaled"
    values: jax.Array
    scale: jax.Array
    computes_in: str = dataclasses.field(metadata={"static": True})
    activations: str | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[::-1]

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.computes_in)

    @property
    def by_output(self) -> bool:
        """Return whether all weights of an output share a scale, so that the product can be scaled afterwards."""
        return self.scale.shape[1] == 1

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        if not self.by_output:
            return in_blocks(x, self, dtype)
        if self.activations:
            return self.of_rounded(*rounded_rows(x, self.activations), dtype)
        # All 8-bit values are exact in every dtype of activations. XLA converts the values within the product.
        return (plain.dot(x, self.values.astype(x.dtype), 1, jnp.float32) * self.of_outputs()).astype(dtype)

    def matmul_on(self, device: Device, x: jax.Array, dtype: Any) -> jax.Array:
        if not self.activations or not device.has_triton:
            return self.matmul(x, dtype)
        values, of_rows = round_rows(x.reshape(-1, x.shape[-1]), self.activations, device=device)
        return self.of_rounded(values.reshape(x.shape), of_rows.reshape(*x.shape[:-1], 1), dtype)

    def of_rounded(self, x: jax.Array, of_rows: jax.Array, dtype: Any) -> jax.Array:
        """Multiply rounded activations with the matrix. x, of_rows: as `rounded_rows` returns them."""
        sums = plain.dot(x, self.values, 1, jnp.int32 if x.dtype == jnp.int8 else jnp.float32)
        return (sums.astype(jnp.float32) * of_rows * self.of_outputs()).astype(dtype)

    def natural(self) -> "Scaled":
        """Return the weight in the form in which it was loaded, which suits no device in particular."""
        return self.in_form(Scaled)

    def of_outputs(self) -> jax.Array:
        """Return the scale of each output, f32[O]. Only for matrices for which `by_output` is True."""
        return jnp.repeat(self.scale[:, 0], self.values.shape[0] // self.scale.shape[0])

    def rows(self) -> jax.Array:
        """Return the dequantised matrix, output-first [O, I], rounded to the dtype of the activations."""
        outputs, inputs = self.values.shape
        blocks = self.scale.shape
        values = self.values.astype(jnp.float32).reshape(blocks[0], outputs // blocks[0], blocks[1], -1)
        return (values * self.scale[:, None, :, None]).reshape(outputs, inputs).astype(self.dtype)

    def dense(self) -> jax.Array:
        return self.rows().T

    def specs(self, spec: Any) -> Any:
        of_values = tuple(reversed((*spec, None, None)[:2]))
        # A dimension of `scale` with a single block is replicated, not sharded.
        of_scale: Any = P(*(axis if size > 1 else None for size, axis in zip(self.scale.shape, of_values, strict=True)))
        return dataclasses.replace(self, values=P(*of_values), scale=of_scale)  # type: ignore[arg-type]


def in_blocks(x: jax.Array, weight: Scaled, dtype: Any) -> jax.Array:
    """Multiply x [..., I] with a matrix whose outputs have several scales each. Return [..., O] in `dtype`."""

    def dequantised(x: jax.Array, weight: Scaled) -> jax.Array:
        return plain.dot(x, weight.rows(), 1, dtype)

    def summed(x: jax.Array, weight: Scaled) -> jax.Array:
        return sum_of_blocks(x, weight).astype(dtype)

    if x.size // x.shape[-1] > FEW_ROWS:
        return dequantised(x, weight)
    product: jax.Array = lax.platform_dependent(x, weight, tpu=summed, default=dequantised)
    return product


def sum_of_blocks(x: jax.Array, weight: Scaled) -> jax.Array:
    """Multiply x [..., I] with one block of the inputs after the other, and scale each product. Return f32[..., O].

    XLA on TPU converts the values within each product. It would write a dequantised matrix to memory for all of them
    (docs/notes/quantization.md).
    """
    outputs, inputs = weight.values.shape
    groups, blocks = weight.scale.shape
    scale = jnp.repeat(weight.scale.T, outputs // groups, axis=1)
    size = inputs // blocks

    def add(block: jax.Array, total: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(x, block * size, size, x.ndim - 1)
        values = lax.dynamic_slice_in_dim(weight.values, block * size, size, 1)
        return total + plain.dot(part, values.astype(x.dtype), 1, jnp.float32) * scale[block]

    total: jax.Array = lax.fori_loop(0, blocks, add, jnp.zeros((*x.shape[:-1], outputs), jnp.float32), unroll=UNROLL)
    return total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamedScaled(Scaled):
    """An 8-bit matrix with a scale for each output, which a CPU reads row by row (`pallas_kernels/streamed.py`)."""

    form: ClassVar[str] = "streamed_scaled"

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        if x.dtype != jnp.float32:
            return super().matmul(x, dtype)
        if self.activations:
            x, of_rows = rounded_rows(x, self.activations)
            return (streamed.product(x.astype(jnp.float32), self.values) * of_rows * self.of_outputs()).astype(dtype)
        return (streamed.product(x, self.values) * self.of_outputs()).astype(dtype)


def rounded_rows(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Round each row of x [..., I] to a dtype in LARGEST, with a scale for the row.

    The result for a row depends on nothing but the row. So a token has the same activations in every pass.

    Returns: the rounded rows x / scale [..., I], and the scales f32[..., 1].
    """
    of_rows = jnp.abs(x.astype(jnp.float32)).max(axis=-1, keepdims=True) / LARGEST[jnp.dtype(dtype).name]
    of_rows = jnp.where(of_rows < TINY, 1.0, of_rows)
    values = x.astype(jnp.float32) * (1.0 / of_rows)
    return (jnp.rint(values) if jnp.dtype(dtype) == jnp.int8 else values).astype(dtype), of_rows


def quantise(x: jax.Array, *, dtype: str, block: tuple[int, int], activations: str | None = None) -> Scaled:
    """Quantise a matrix [I, O] to 8 bits, symmetric around 0. Each block's largest absolute value sets its scale.

    dtype: "int8" or "float8_e4m3fn".
    block: number of inputs and number of outputs that share a scale, divisors of I and O.
    activations: see `Scaled`.
    """
    inputs, outputs = x.shape
    blocks = x.T.astype(jnp.float32).reshape(outputs // block[1], block[1], inputs // block[0], block[0])
    scale = jnp.abs(blocks).max(axis=(1, 3)) / LARGEST[dtype]
    scale = jnp.where(scale == 0, 1.0, scale)  # a scale of 0 would make checkpoints that no reader accepts
    values = blocks / scale[:, None, :, None]
    values = (jnp.rint(values) if dtype == "int8" else values).reshape(outputs, inputs).astype(dtype)
    return Scaled(values, scale, x.dtype.name, activations)


def abstract(
    shape: tuple[int, int], dtype: str, block: tuple[int, int], computes_in: str, activations: str | None = None
) -> Scaled:
    """Return a quantised matrix whose arrays are abstract, with shapes and dtypes but without values.

    shape: shape [I, O] of the matrix.
    dtype, block: as in `quantise`.
    computes_in: dtype of the activations.
    activations: see `Scaled`.
    """
    scale = shape[1] // block[1], shape[0] // block[0]
    values: Any = jax.ShapeDtypeStruct(shape[::-1], dtype)
    of_scale: Any = jax.ShapeDtypeStruct(scale, jnp.float32)
    return Scaled(values, of_scale, computes_in, activations)
