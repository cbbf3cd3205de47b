"""Runs `jaxspec bench` on a preset with random weights in the blocks of a GGUF file.

python docs/tools/bench_blocks.py q4_k: Qwen3-8B with EAGLE-3, as in docs/notes/gpu.md. Another preset is the second
argument. No name of `quantization` makes such blocks: `gguf` keeps those of a file.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.bench.bench_options import BenchOptions
from jaxspec.bench.measure import bench
from jaxspec.loading import quantised
from jaxspec.options import quantization
from jaxspec.options.quantization import Quantization
from pallas_kernels.weights import grouped

SCALE = 0.02  # size of the weights, about


def random_blocks(x: jax.Array, form: Quantization) -> grouped.Grouped:
    """Return random weights of the shape of a matrix, which is not read. form: has the blocks' name as its dtype."""
    layout, of_matrix = grouped.BLOCKS[form.dtype], (x.shape[0], x.shape[1])

    def make(field: str, i: int, shape: tuple[int, int], dtype: str) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(i), len(field))
        if field == "values":
            return jax.random.bits(key, shape, jnp.uint8)
        if dtype != "float16":
            return jax.random.randint(key, shape, 24, 64).astype(dtype)
        size = SCALE / 2 ** (sum(layout.bits) - 1) / (44 if len(layout.scale) == 2 else 1)
        middle = 2 ** sum(layout.bits) / 2 if field == "offset" else -1
        return (-middle * size * jax.random.uniform(key, shape, minval=0.8, maxval=1.2)).astype(dtype)

    return grouped.arrays(layout, of_matrix, make, x.dtype.name)


def main(kind: str, preset: str = "qwen3-8b+eagle3") -> None:
    """Run the bench. kind: name of the blocks, as in `grouped.BLOCKS`."""
    forms: Any = quantization.FORMS
    forms[kind] = Quantization(kind, grouped.BLOCKS[kind].scale[0][1], 1)
    vars(quantised)["quantise"] = random_blocks
    drafts: dict[str, Any] = {"ks": (4,), "stages": ("target", "round")} if "+" in preset else {"stages": ("target",)}
    bench(BenchOptions(preset=preset, batch_sizes=(1, 16), quantization=kind, **drafts))


if __name__ == "__main__":
    main(*sys.argv[1:])
