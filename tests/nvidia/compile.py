"""A program of its own, with NVIDIA's compilers on its path: cases compiled for one GPU, what they need as JSON.

python -m tests.nvidia.compile GPU MODULE [BEGINNING ...]: of the cases' names, all where none is given.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jaxspec.hardware.accelerators import ACCELERATORS
from tests.nvidia.gpus import BLOCK_REGISTERS, GPUS, PTXAS

# XLA's GpuTargetConfigProto. Programs of other than the newest instructions run on all later GPUs, those with all
# instructions of theirs, which Hopper's matrix units need, on them alone.
TARGET = """
platform_name: "CUDA"
device_description_str: "{name}"
runtime_version {{ major: 12 minor: 9 }}
dnn_version_info {{ major: 9 minor: 8 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  core_count: {gpu.multiprocessors}
  fpus_per_core: {gpu.units}
  clock_rate_ghz: {gpu.clock}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {gpu.threads}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: {registers}
  registers_per_block_limit: {registers}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.most_shared}
  shared_memory_per_core: {gpu.shared}
  l2_cache_size: {gpu.cache}
  device_memory_size: {facts.memory}
  memory_bandwidth: {facts.bandwidth}
}}
"""
LAUNCH = re.compile(r"\] (\S+) grid: \[.*?\] threads: \[(\d+), (\d+), (\d+)\] +shared_memory: (\d+) bytes")
SENT = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
COPY = re.compile(r" = \(?(\w+\[[\d,]*\]).*? copy(?:-start)?\(")
ONE_STEP = re.compile(r' while\(.*"known_trip_count":\{"n":"1"\}')
USED = re.compile(
    r"entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers(?:.*? (\d+) bytes smem)?", re.DOTALL
)


def mesh(name: str, count: int = 1) -> Mesh:
    """So many GPUs of one host that is not here."""
    gpu = GPUS[name]
    major, minor = gpu.device.capability
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    facts, registers = ACCELERATORS[gpu.facts], BLOCK_REGISTERS
    text = TARGET.format(
        name=name, gpu=gpu, facts=facts, major=major, minor=minor, features=features, registers=registers
    )
    topology = topologies.get_topology_desc(name, "cuda", target_config=text, topology=f"1x1x{count}")
    return Mesh(np.array(topology.devices), ("model",), axis_types=(AxisType.Auto,))


def compile(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """The program, and what `gpus.Compiled` wants to know of it."""
    with tempfile.TemporaryDirectory() as folder:
        program = lowered.compile(compiler_options={"xla_dump_to": folder})
        kernels = read(Path(folder))
    memory, sent = program.memory_analysis(), [line for line in program.as_text().splitlines() if SENT.search(line)]
    return program, {
        "sums": sum("all-reduce" in SENT.search(line)[1] for line in sent),
        "sent_to_propose": sum("/propose/" in line for line in sent),
        "kernels": kernels,
        "copies": sorted(set(COPY.findall(program.as_text()))),
        "loops_of_one_step": len(ONE_STEP.findall(program.as_text())),
        "triton": program.as_text().count('custom_call_target="__gpu$xla.gpu.triton"'),
        "temporary": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
    }


def read(folder: Path) -> list[dict[str, Any]]:
    """Of each kernel that the program launches, from what the compilers wrote down."""
    (sequence,) = folder.glob("*.thunk_sequence.txt")
    with ThreadPoolExecutor(2) as several:
        used = {name: facts for some in several.map(assembled, folder.glob("*.ptx")) for name, facts in some.items()}
    kernels: dict[str, dict[str, Any]] = {}
    for name, x, y, z, shared in LAUNCH.findall(sequence.read_text()):
        facts = kernels.setdefault(name, {"name": name, "threads": int(x) * int(y) * int(z), "launches": 0})
        facts["launches"] += 1
        spilled, registers, static, barriers = used[name]
        facts |= {"registers": registers, "spilled": spilled, "shared": int(shared) + static, "barriers": barriers}
    return list(kernels.values())


def assembled(ptx: Path) -> dict[str, tuple[int, int, int, int]]:
    """Kernel -> (bytes spilled, registers, bytes of shared memory beside those that its launch asks for, barriers)."""
    text = ptx.read_text()
    if ".entry" not in text:
        return {}
    architecture = re.search(r"^\.target (\w+)", text, re.MULTILINE)[1]
    command = [PTXAS, "--verbose", "--gpu-name", architecture, "--output-file", "/dev/null", ptx]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    parts = said.split("Compiling ")[1:]
    found = [USED.search(part).groups(default="0") for part in parts]
    barriers = {code.split("(")[0]: code.count("bar.sync") for code in text.split(".entry ")[1:]}
    return {
        name: (int(spilled), int(registers), int(static), barriers[name]) for name, spilled, registers, static in found
    }


def main(name: str, module: str, *beginnings: str) -> None:
    cases = importlib.import_module(module).cases(name, mesh(name))
    print(json.dumps({case: build() for case, build in cases.items() if case.startswith(beginnings or "")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
