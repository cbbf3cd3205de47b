"""Every test process: eight fake CPU devices, quick compilation, one shared compilation cache."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

# A shell ignores it in what it starts in the background, and what is started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

GPU = os.environ.get("JAXSPEC_TEST_PLATFORM") == "gpu"

if not GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Most of the time is compiling. The optimiser's expensive passes and the MLIR emitters of fusions take three
    # quarters of it for tiny programs, and change no result. Flags that are set already win.
    flags = [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_disable_hlo_passes=hlo-verifier",  # of what the compiler itself makes
    ]
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 12):  # later ones have no other emitters
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"jaxspec-tests-xla-{os.getuid()}")
)
# Engines of the same models compile the same programs, and so do other workers: of engines' tests half are found.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")

from jaxtyping import install_import_hook  # noqa: E402

from tests.support import annotations  # noqa: E402
from tests.support.sizes import differs_twice  # noqa: E402

# Shapes in annotations hold in tests: these modules are checked on import, so before anything imports them.
CHECKED = ("jaxspec.sampling", "jaxspec.verify", "jaxspec.drafters", "jaxspec.decode.round")
install_import_hook(CHECKED, f"{annotations.__name__}.function")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.support import few_programs, quick_jax, shared_programs  # noqa: E402

if not GPU:
    few_programs.compile_few()
    quick_jax.keep_contexts()
    shared_programs.share()

# No example has to be quick: the machine may be busy.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

hypothesis.settings.register_profile("any machine", deadline=None, database=None)  # a busy one is slow, not wrong
hypothesis.settings.load_profile("any machine")

# The core's own tests, which a GPU has to pass too: its kernels, its rounding, its compiler.
ALSO_ON_GPU = (
    "decode/test_greedy.py",
    "decode/test_greedy_ends.py",
    "decode/test_processed_statistics.py",
    "decode/test_round.py",
    "decode/test_seeded.py",
    "decode/test_statistics.py",
    "engine/test_engine.py",
    "engine/test_logprobs.py",
    "engine/test_pages.py",
    "engine/test_parameters.py",
    "engine/test_seeds.py",
    "models/test_oracle.py",
)
ALSO_ON_SEVERAL = ("parallel/test_tensor_parallel.py",)  # where there are two GPUs


@pytest.fixture(autouse=True)
def interruptible():
    """Fail a test that leaves interrupts to a handler of its own: later tests in the same process send some."""
    yield
    left = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert left is signal.default_int_handler


@pytest.fixture
def exact_shapes():
    """Give engines the shapes that users' engines have: see `few_programs`."""
    with contextlib.nullcontext() if GPU else few_programs.exact_shapes():
        yield


# Every program compiled for the CPU maps some memory, and Linux gives a process 65,530 mappings: beyond them the
# compiler aborts. So a process that has made many lets go of them; the compilation cache has them still. What it let
# go of, glibc keeps: given back, two workers fit into a small machine beside what tests start. Counting and giving back
# take a tenth of a second, so that they are rare.
MOST_MAPPINGS, EVERY = 25_000, 50
num_tests = itertools.count(1)
give_back = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # glibc's own
gc.set_threshold(50_000, 20, 20)  # tracing makes many objects and few cycles: searching for these took 8 % of all time


@pytest.fixture(autouse=True)
def few_mappings():
    yield
    if next(num_tests) % EVERY == 0 and Path("/proc/self/maps").exists():
        if too_many():
            for name, module in list(sys.modules.items()):
                if name.startswith("tests."):
                    for value in vars(module).values():
                        if hasattr(value, "cache_clear"):  # engines and models that tests share
                            value.cache_clear()
            jax.clear_caches()
            gc.collect()
        if too_many():  # of engines that somebody holds: FastAPI's caches have the routes of every server, and these it
            programs = sys.modules.get("jaxspec.runtime.programs")
            for found in gc.get_objects() if programs else ():
                if type(found) is programs.Programs:
                    found.compiled.clear()
            gc.collect()
        give_back(0)


def too_many() -> bool:
    return Path("/proc/self/maps").read_bytes().count(b"\n") >= MOST_MAPPINGS


def pytest_collection_finish() -> None:
    """Keep modules and test items, which live to the end, out of every later search for cycles."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu wait for a GPU backend: JAXSPEC_TEST_PLATFORM=gpu pytest -m gpu."""
    on_gpu = GPU and jax.default_backend() == "gpu"
    also = ALSO_ON_GPU + (ALSO_ON_SEVERAL if on_gpu and jax.device_count() > 1 else ())
    for item in items:
        if on_gpu and item.path.as_posix().endswith(also):
            item.add_marker(pytest.mark.gpu)
        if differs_twice(item):
            item.add_marker(pytest.mark.exhaustive)
        if not on_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: JAXSPEC_TEST_PLATFORM=gpu pytest -m gpu"))
