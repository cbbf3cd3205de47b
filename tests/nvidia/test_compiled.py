"""Programs compiled by NVIDIA's own compilers for GPUs that are not there: every op, and the device program."""

from __future__ import annotations

import dataclasses

import pytest

from jaxspec.bench.presets import preset
from jaxspec.hardware.accelerators import ACCELERATORS
from jaxspec.hardware.chips import chips
from jaxspec.inspect.fit import Wanted, fit
from pallas_kernels._peer_sum import mailbox_size
from tests.nvidia.gpus import BLOCK_REGISTERS, GPUS, REGISTERS, Compiled, compiled
from tests.nvidia.programs import FAMILIES
from tests.support.sizes import cases

MODEL, OTHERS = "qwen3-0.6b, ", ("smollm2", "qwen3-8b", "qwen3-0.6b in float32", "heads of 256")  # see ops.py
# Of ours: what the compiler makes itself it chooses anew, and without spills, where the GPU is there.
KERNELS = (
    *("add_and_norm", "add_and_scale", "attention", "heads", "argmax_token", "paged_attention", "product"),
    *("self_attention", "split_product", "combine_splits", "sum_and_norm"),
)
# Only programs over two GPUs have the first, and only whole models the second: before their head.
OF_PROGRAMS = {"sum_and_norm", "add_and_norm"}
# GPU -> the ops' kernels there: those that want 227 KB of shared memory are meant for no other.
EVERYWHERE = {"heads", "paged_attention", "self_attention", "split_product", "combine_splits"}
MEANT = {
    "T4": set(),
    "A100": EVERYWHERE,
    "L4": EVERYWHERE,
    "H100": set(KERNELS) - OF_PROGRAMS,
    "B200": set(KERNELS) - OF_PROGRAMS,
}


def ours(program: Compiled):
    return [kernel for kernel in program.kernels if kernel.name.split("__")[0] in KERNELS]


def check(gpu: str, case: str, program: Compiled) -> None:
    """It can run on that GPU, and no kernel of ours lacks registers."""
    facts = GPUS[gpu]
    assert program.kernels, f"{case}: nothing was read of it"
    for kernel in program.kernels:
        assert kernel.shared <= facts.most_shared, f"{case}: {kernel}"
        assert kernel.registers <= REGISTERS, f"{case}: {kernel}"
        assert kernel.registers * kernel.threads <= BLOCK_REGISTERS, f"{case}: {kernel}"
    assert sum(kernel.launches for kernel in ours(program)) == program.triton, f"{case}: kernels are not all known"
    spilled = [kernel for kernel in ours(program) if kernel.spilled]
    assert not spilled, f"{case}: {spilled}"
    assert (program.triton == 0) == (not facts.device.has_triton), case


@cases("gpu", GPUS, rest=["L4", "H100", "B200"])  # an A100 gets the kernels of an L4, which has less room, a T4 none
def test_every_op(gpu):
    found = compiled(gpu, "tests.nvidia.ops", MODEL)
    for case, program in found.items():
        check(gpu, case, program)
    assert {kernel.name.split("__")[0] for program in found.values() for kernel in ours(program)} == MEANT[gpu]


@cases("gpu", [gpu for gpu in GPUS if gpu != "T4"], rest=["H100"])  # whose plain forms say no more
@cases("model", OTHERS, rest=["qwen3-8b", "heads of 256"])
def test_every_op_of_other_models(gpu, model):
    for case, program in compiled(gpu, "tests.nvidia.ops", model).items():
        check(gpu, case, program)
        if case.endswith("in int4, verification, one row"):  # tiles of 16 rows take 102 registers or more
            registers = [kernel.registers for kernel in ours(program) if kernel.name.startswith("product")]
            assert 0 < max(registers, default=0) <= 88, case


def check_program(gpu: str, case: str, program: Compiled) -> None:
    """The same, and it writes its pages in place and takes no more memory than the engine keeps for it."""
    check(gpu, case, program)
    assert program.aliased == program.pages, case
    assert program.loops_of_one_step == 0, case
    assert program.temporary < program.reserved, f"{case}: {program.temporary / 1e6:.1f} MB"


@cases("gpu", GPUS, rest=["T4"])
def test_the_device_program(gpu):
    for case, program in compiled(gpu, "tests.nvidia.programs", "few layers").items():
        check_program(gpu, case, program)


@cases("gpu", GPUS, rest=["L4"])
def test_other_device_programs(gpu):
    for case, program in compiled(gpu, "tests.nvidia.programs", "sampling", "one row").items():
        check_program(gpu, case, program)


@cases("gpu", ["L4", "H100"], rest=["H100"])
def test_heads_beside_their_target(gpu):
    """Features are written in place, like keys and values. No kernel of a single token brings parts of its product to
    their threads one by one, which took 155 barriers and twice the time."""
    for case, program in compiled(gpu, "tests.nvidia.programs", "eagle3", "dflash").items():
        check_program(gpu, case, program)
        barriers = [kernel.barriers for kernel in ours(program) if kernel.name.startswith("self_attention")]
        assert all(number <= 100 for number in barriers), (case, barriers)


@cases("gpu", ["L4", "H100"], rest=["H100"])
def test_two_gpus(gpu):
    """Each runs the kernels on its part. Two sums a layer, which a kernel computes on Hopper, one for the rows of the
    table; a draft that is whole on each sends nothing."""
    found = compiled(gpu, "tests.nvidia.programs", "two GPUs")
    for case, program in found.items():
        check_program(gpu, case, program)
    of_layers = 2 * 2
    assert found["two GPUs, launch"].sums == 1 + (0 if gpu == "H100" else of_layers)
    assert found["two GPUs, launch"].sent_to_propose == 0
    assert found["two GPUs, one row, launch"].sent_to_propose > 0
    # For a single id the compiler by itself would gather all of the table, in every pass.
    assert found["two GPUs, plain, launch"].temporary < 8e6
    names = {kernel.name.split("__")[0] for kernel in ours(found["two GPUs, launch"])}
    assert names >= ({"add_and_norm", "product", "heads"} if gpu == "H100" else {"heads"})
    if gpu == "H100":
        for case in ("two GPUs, launch", "two GPUs, plain, launch"):
            summing = [kernel for kernel in found[case].kernels if kernel.name.startswith("sum_and_norm")]
            assert sum(kernel.launches for kernel in summing) == of_layers, case
            # The other GPU writes to the mailbox itself, and would not find a copy of it.
            assert f"s32[{mailbox_size(4096)}]" not in found[case].copies, case
        assert found["two GPUs, plain, launch"].sums == 1


# Family of no preset -> the GPU that it is compiled for.
ON = {name: "L4" if name in ("muse-glimmer-30b", "smollm3-3b", "ministral-3-3b") else "H100" for name in FAMILIES}


@cases("name", ON, rest=["gemma-4-e2b"])
def test_other_families(name):
    """Whole models beside a pool as large as the engine would make it, and four layers of Muse Glimmer with its whole
    assistant. Gemma 4's heads of 512 attend in plain jnp, those of 256 in a kernel."""
    gpu = ON[name]
    for case, program in compiled(gpu, "tests.nvidia.programs", name).items():
        check_program(gpu, case, program)
        assert program.weights + program.pages + program.temporary < ACCELERATORS[GPUS[gpu].facts].programs_memory
        assert "paged_attention" in {kernel.name.split("__")[0] for kernel in ours(program)}, case


@cases("gpu", ["L4", "T4"], rest=["T4"])
def test_whole_models(gpu):
    """All layers, and a pool as large as the engine would make it there: compiling shows that it fits."""
    for case, program in compiled(gpu, "tests.nvidia.programs", "whole").items():
        check_program(gpu, case, program)
        assert program.weights + program.pages + program.temporary < ACCELERATORS[GPUS[gpu].facts].programs_memory


@pytest.mark.thorough
def test_weights_in_4_bits():
    """Qwen3-8B with its head and 8,000 tokens of pages fits a T4, as `jaxspec info` reports."""
    target = preset("qwen3-8b")
    asked = Wanted(target, preset("eagle3", target), chips("T4"), dtype="float16", max_model_len=4096, max_num_seqs=16)
    said = fit(dataclasses.replace(asked, quantization="int4", draft_quantization="int4"))
    assert said.tokens >= 8_000
    for case, program in compiled("T4", "tests.nvidia.programs", "int4").items():
        check_program("T4", case, program)
        assert program.reserved == said.temporary, case
        assert program.weights + program.pages + program.temporary < ACCELERATORS["T4"].programs_memory
