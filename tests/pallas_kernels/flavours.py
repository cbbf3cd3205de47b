"""What the tests of all ops share: the flavours of a kernel, devices to compile for, and ragged layouts."""

import functools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.device import CPU, Device, here
from pallas_kernels.forms import call
from pallas_kernels.kv_write import kv_write
from pallas_kernels.pages import zeros

T4, A100, H100 = (Device("gpu", version) for version in ((7, 5), (8, 0), (9, 0)))
FLAVOURS = [
    "reference",
    "tpu",  # under interpretation
    "gpu",  # under interpretation
    pytest.param("gpu compiled", marks=pytest.mark.gpu),
]


class Racing(Device):
    """The CPU, with an interpreter that looks for copies that race."""

    interpret = pltpu.InterpretParams(detect_races=True)

    def __init__(self) -> None:
        super().__init__("cpu")


few_examples = settings(max_examples=12, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def kernel(op: str, name: str, **options):
    """The flavour `name` of `op`, jitted: one program for each set of shapes, whatever the examples hold."""
    if name in ("tpu", "gpu", "gpu compiled"):
        options["device"] = here() if name == "gpu compiled" else CPU
    return functools.partial(call, op, name.split()[0], **options)


def rounded(pages, dtype):
    """Pages [P, S, 2G, D] in 8 bits, and the float32 values that they hold."""
    p, s, g2, d = pages.shape
    stored = kv_write(zeros(p, s, g2, d, dtype), pages.reshape(-1, g2, d), np.arange(p * s, dtype=np.int32))
    return stored, dequantised(stored)


def dequantised(pages):
    """The float32 values [P, S, 2G, D] of `ScaledPages`."""
    return np.asarray(pages.values, np.float32) * np.asarray(pages.by_head()).swapaxes(1, 2)[..., None]


def in_two_numbers(sums):
    """Return `Prepared.sums` [rows, _] as float32 [rows, chunks, 2, 8]: each group's sum is that of two numbers."""
    return np.asarray(sums, np.float32).reshape(len(sums), -1, 2, 8)


@st.composite
def layouts(draw, num_tokens: int, num_rows: int):
    """(query_start, num_rejected): rows that may be empty, fully rejected, or leave a padded tail."""
    ends = draw(st.lists(st.integers(0, num_tokens), min_size=num_rows, max_size=num_rows).map(sorted))
    query_start = np.array([0, *ends], np.int32)
    rejected = [draw(st.integers(0, int(length))) for length in np.diff(query_start)]
    return query_start, np.array(rejected, np.int32)
