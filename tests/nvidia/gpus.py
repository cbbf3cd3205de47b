"""NVIDIA's GPUs as their compilers want to know them, and the compilers, which need no GPU.

They stand in a folder of their own: where they are on the path of everyday programs, each of these looks for a GPU's
driver and says that there is none. So programs are compiled by a process a GPU that has the folder on its path.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxspec.hardware.accelerators import ACCELERATORS
from pallas_kernels.device import Device
from tests.support.root import ROOT

FOLDER = Path(os.environ.get("JAXSPEC_NVIDIA_COMPILERS") or ROOT / ".nvidia")
PTXAS = FOLDER / "nvidia/cuda_nvcc/bin/ptxas"
KB = 1 << 10
REGISTERS, BLOCK_REGISTERS = 255, 65_536  # that a thread, and that all threads of a program may have


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What compilers are told of a GPU.

    facts: its name in ACCELERATORS, where the rest stands.
    shared, threads, units: of a multiprocessor: bytes of shared memory, threads, float32 units.
    most_shared: bytes of it that one program may have.
    clock: GHz.
    cache: bytes of L2.
    """

    facts: str
    multiprocessors: int
    shared: int
    most_shared: int
    threads: int
    units: int
    clock: float
    cache: int

    @property
    def device(self) -> Device:
        return ACCELERATORS[self.facts].device


# As in the CUDA programming guide's table of compute capabilities, and in the data sheets.
GPUS = {
    "T4": Gpu("T4", 40, 64 * KB, 64 * KB, 1024, 64, 1.59, 4096 * KB),
    "A100": Gpu("A100-40GB", 108, 164 * KB, 163 * KB, 2048, 64, 1.41, 40960 * KB),
    "L4": Gpu("L4", 58, 100 * KB, 99 * KB, 1536, 128, 2.04, 49152 * KB),
    "H100": Gpu("H100", 132, 228 * KB, 227 * KB, 2048, 128, 1.98, 51200 * KB),
    "B200": Gpu("B200", 148, 228 * KB, 227 * KB, 2048, 128, 1.96, 129024 * KB),
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of a compiled program.

    threads: of a program of its grid.
    registers: of a thread.
    shared: bytes of shared memory.
    spilled: bytes that a thread stores because it has no registers left.
    barriers: places where its threads wait for each other.
    launches: places of the compiled program that start it.
    """

    name: str
    threads: int
    registers: int
    shared: int
    spilled: int
    barriers: int
    launches: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program, sizes in bytes.

    triton: calls of kernels that are ours.
    temporary: its own memory.
    aliased: donated arguments that it writes in place.
    pages, weights: all of them.
    reserved: what the engine keeps for temporary memory.
    loops_of_one_step: what the compiler makes of looking up one row, unless it takes them out again.
    copies: types of the arrays that are copied.
    sums: over several GPUs; sent_to_propose: whatever these send one another for drafts.
    """

    kernels: tuple[Kernel, ...]
    triton: int
    temporary: int
    aliased: int
    pages: int = 0
    weights: int = 0
    reserved: int = 0
    sums: int = 0
    sent_to_propose: int = 0
    loops_of_one_step: int = 0
    copies: tuple[str, ...] = ()


def compiled(gpu: str, cases: str, *beginnings: str) -> dict[str, Compiled]:
    """The cases of the module `cases` (all, or those whose names begin so) as compiled for this GPU. Skips where the
    compilers are missing; fails where one refuses a case."""
    if not PTXAS.exists():
        pytest.skip(f"NVIDIA's compilers are not in {FOLDER}: make nvidia (or name theirs in JAXSPEC_NVIDIA_COMPILERS)")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, FOLDER))),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": "",
    }
    command = [sys.executable, "-m", "tests.nvidia.compile", gpu, cases, *beginnings]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, f"{gpu}, {cases}: {ran.stderr[-4000:]}"
    return {name: read(facts) for name, facts in json.loads(ran.stdout).items()}


def read(facts: dict[str, Any]) -> Compiled:
    return Compiled(**facts | {"kernels": tuple(Kernel(**kernel) for kernel in facts["kernels"])})
