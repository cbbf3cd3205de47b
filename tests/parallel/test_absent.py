"""libtpu is left out where nothing tells of a TPU, and only there; commands tell of platforms that are not here."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.parallel.absent import may_have_tpu
from tests.support.model_folders import write_model
from tests.support.root import ROOT
from tests.support.sizes import cases

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
no_tpu_here = pytest.mark.skipif(may_have_tpu(), reason="this machine may have a TPU")


def machine(root: Path, *files: str, pci: tuple[tuple[str, str], ...] = ()) -> Path:
    for i, (vendor, kind) in enumerate(pci):
        device = root / f"sys/bus/pci/devices/0000:00:0{i}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


@pytest.mark.parametrize(
    ("files", "pci", "environment", "may"),
    [
        ((), (), {}, False),
        (("dev/vfio/vfio", "dev/accel/accel0"), (("0x8086", "0x060000"),), {}, False),
        ((), (("0x1ae0", "0x020000"), ("0x1ae0", "0x010802")), {}, False),  # a virtual machine's network and disk
        ((), (), {"TPU_SKIP_MDS_QUERY": "1", "TPU_LIBRARY_PATH": "/x"}, False),  # JAX sets these itself
        (("dev/accel0",), (), {}, True),
        (("dev/vfio/vfio", "dev/vfio/0"), (), {}, True),
        ((), (("0x8086", "0x060000"), ("0x1ae0", "0x088000")), {}, True),
        ((), (("0x1ae0", "0xff0000"),), {}, True),
        ((), (), {"TPU_WORKER_ID": "0"}, True),
        ((), (), {"TPU_ACCELERATOR_TYPE": "v5litepod-8"}, True),
        ((), (), {"JAX_FORCE_TPU_INIT": "1"}, True),
    ],
)
def test_what_tells_of_one(tmp_path, files, pci, environment, may):
    assert may_have_tpu(machine(tmp_path, *files, pci=pci), environment) is may


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process in which JAX chooses."""
    chosen = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=chosen)


BACKENDS = "import jax; jax.devices(); print(sorted(jax.extend.backend.backends()))"
LEAVE = "import jax.extend.backend; from jaxspec.parallel.absent import leave_out_absent_tpu as f; "


@needs_libtpu
@no_tpu_here
def test_jax_chooses_among_the_others_and_says_nothing():
    """The same as without libtpu. What it would say is checked too, lest the test look for what nobody prints."""
    loud, quiet = python(BACKENDS.replace("jax;", "jax.extend.backend;")), python(LEAVE + "f(); " + BACKENDS)
    assert loud.returncode == quiet.returncode == 0, quiet.stderr
    assert quiet.stdout == loud.stdout
    assert "tpu" in loud.stderr.lower()
    assert quiet.stderr == ""


@needs_libtpu
@no_tpu_here
@pytest.mark.parametrize("environment", [{"JAX_PLATFORMS": "tpu,cpu"}, {"TPU_WORKER_ID": "0"}])
def test_nothing_changes_where_jax_was_told_or_there_may_be_one(environment):
    code = LEAVE + "from jax._src import xla_bridge as b; was = b._backend_factories['tpu']; f(); "
    done = python(code + "print(b._backend_factories['tpu'] is was)", **environment)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.thorough
@needs_libtpu
@no_tpu_here
def test_llm_says_nothing_either(tmp_path):
    """Importing changes nothing: only where an LLM is made, and so devices are asked for."""
    folder = write_model(tmp_path / "model")
    code = "from jaxspec import LLM; from jax._src import xla_bridge as b; was = b._backend_factories['tpu']; "
    code += f"LLM({str(folder)!r}, max_model_len=64); print(b._backend_factories['tpu'] is was)"
    done = python(code)
    assert (done.stdout, done.stderr) == ("False\n", "")


@needs_libtpu
@no_tpu_here
def test_it_may_come_late():
    """Where JAX has been used already."""
    done = python("import jax; jax.devices(); " + LEAVE + "f(); print(jax.devices())", JAX_PLATFORMS="")
    assert done.returncode == 0, done.stderr


@cases(
    ("words", "platforms"),
    [("generate x", "wrong"), ("info smollm2-135m-instruct", "cpu,wrong"), ("bench", "cuda")],
    quick=[("info smollm2-135m-instruct", "cpu,wrong")],
)
def test_a_command_says_what_else_there_is(words, platforms):
    """JAX has a RuntimeError for a name that it does not know, and an AssertionError for GPUs that are not there."""
    if platforms == "cuda" and Path("/dev/nvidia0").exists():
        pytest.skip("needs no GPU")
    program = [sys.executable, "-m", "jaxspec.cli", *words.split()]
    chosen = os.environ | {"JAX_PLATFORMS": platforms}
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, env=chosen, timeout=300)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"jaxspec: JAX_PLATFORMS={platforms!r} is not available")
    assert re.search(r": leave it out, or use (cpu|\w+, cpu|cpu, \w+)$", line)
    assert "Traceback" not in done.stderr
