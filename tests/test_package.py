"""The package as a whole: what importing costs, what is public, and which way the imports point."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxspec

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxspec", "pallas_kernels", "checkpoints")

# Room -> the rooms that it may import from, itself aside: those that it does import from, and no other. A room is a
# package of jaxspec, or one of its files; where only a part of one is needed, the part. "jaxspec." is left out.
ARROWS = {
    "pallas_kernels": "",
    "checkpoints": "models.config models.limits",
    "jaxspec": "",  # __init__: public names are strings, loaded on first use
    "accelerators": "",
    "options": "",
    "shapes": "",
    "outputs": "",
    "detokenizer": "",
    "progress": "",
    "parallel": "",
    "config": "options",
    "sampling_params": "options",
    "cache": "parallel models.config",  # the config is data, not the decoder
    "sampling": "shapes",
    "models": "parallel cache pallas_kernels",
    "drafters": "shapes models sampling pallas_kernels",
    "verify": "shapes sampling pallas_kernels drafters.base",  # a Proposal is what it verifies
    "decode": "shapes config parallel cache models sampling pallas_kernels drafters verify",
    "engine": "config options outputs sampling_params parallel cache models sampling pallas_kernels drafters decode",
    "prompts": "options sampling_params",
    "job": "outputs engine.request detokenizer prompts",
    "loading": "checkpoints pallas_kernels models engine.setup",
    "llm": "config outputs sampling_params parallel models checkpoints loading engine progress prompts job",
    "async_llm": "config outputs sampling_params engine prompts job llm",
    "prometheus": "engine.request llm async_llm",
    "info": "accelerators config parallel cache models pallas_kernels engine.setup checkpoints loading",
    "demo": "config outputs sampling_params parallel progress checkpoints engine.setup llm",
    "bench": "config outputs sampling_params parallel cache models pallas_kernels drafters.base decode engine progress "
    "checkpoints loading",
    "train": "config options outputs sampling_params shapes parallel cache models engine progress checkpoints "
    "loading llm",
    "cli": "accelerators config outputs sampling_params parallel progress checkpoints job llm info demo bench train",
}


def full(name: str) -> str:
    return name if name.split(".")[0] in PACKAGES else f"jaxspec.{name}"


ALLOWED = {full(room): set(map(full, arrows.split())) for room, arrows in ARROWS.items()}


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())


def room(module: str) -> str:
    parts = module.split(".")
    return parts[0] if parts[0] != "jaxspec" else ".".join(parts[:2])


def imported(path: Path) -> Iterator[str]:
    """Our own modules that a file imports anywhere in it, by full name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            assert node.module is not None
            # `from jaxspec import info` names a module, `from jaxspec.llm import LLM` an object in one.
            named = [f"{node.module}.{a.name}" for a in node.names]
            names = [name if name in MODULES else node.module for name in named]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in PACKAGES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    here = room(module)
    allowed = ALLOWED[here] | {here}
    for name in imported(MODULES[module]):
        fits = any(name == a or name.startswith(a + ".") for a in allowed)
        assert fits, f"{module} imports {name}; {here} may import from {', '.join(sorted(allowed))}"


def test_allowed_is_what_is_used():
    assert ALLOWED.keys() == {room(module) for module in MODULES}
    assert not unused(ALLOWED)
    planted = ALLOWED | {"jaxspec.prompts": ALLOWED["jaxspec.prompts"] | {"jaxspec.llm"}}
    assert unused(planted) == {("jaxspec.prompts", "jaxspec.llm")}, "the test sees none any more"


def unused(allowed: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Arrows that no import of the room needs."""
    used = {(room(module), name) for module, path in MODULES.items() for name in imported(path)}
    within = lambda name, arrow: name == arrow or name.startswith(arrow + ".")
    needed = lambda here, arrow: any(there == here and within(name, arrow) for there, name in used)
    return {(here, arrow) for here, arrows in allowed.items() for arrow in arrows if not needed(here, arrow)}


def test_no_circles():
    """Not even by an import in a function, or for types only."""
    graph = {module: set(imported(path)) for module, path in MODULES.items()}
    assert not circle(graph), " -> ".join(circle(graph))
    graph["jaxspec.options"].add("jaxspec.config")
    assert set(circle(graph)) == {"jaxspec.options", "jaxspec.config"}, "the test sees none any more"


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as found:
        return found.args[1]
    return []


def test_kernels_stand_alone():
    """pallas_kernels is of use without jaxspec: it imports jax, numpy and the standard library only."""
    outside = set()
    for module, path in MODULES.items():
        if not module.startswith("pallas_kernels"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            outside |= {name.split(".")[0] for name in names}
    assert outside - set(sys.stdlib_module_names) <= {"jax", "jaxlib", "jaxtyping", "numpy", "pallas_kernels"}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("first", [*PACKAGES, "jaxspec.llm", "jaxspec.cli", "jaxspec.decode.round"])
def test_any_module_may_be_imported_first(first):
    run(f"import {first}; import checkpoints; from jaxspec import LLM")


def test_import_is_light():
    """jax and the engine are loaded when they are needed, so that `jaxspec --help` answers at once."""
    heavy = ["jax", "jaxlib", "flax", "numpy", "transformers", "matplotlib", "huggingface_hub"]
    heavy += ["jaxspec.engine", "jaxspec.llm", "jaxspec.loading", "checkpoints"]
    code = f"import sys, jaxspec, jaxspec.cli; print(sorted(set({heavy!r}) & set(sys.modules)))"
    assert run(code).strip() == "[]"


def test_public_names():
    assert set(jaxspec.__all__) >= {"LLM", "SamplingParams", "SpeculativeConfig", "generate", "__version__"}
    assert set(jaxspec.__all__) >= {"RequestOutput", "CompletionOutput", "SpecDecodeMetrics"}
    assert len(jaxspec.__all__) <= 10
    for name in jaxspec.__all__:
        assert getattr(jaxspec, name) is not None
        assert name in dir(jaxspec)
    with pytest.raises(AttributeError, match="no attribute 'LLm'; public names: LLM, AsyncLLM"):
        jaxspec.LLm  # noqa: B018
    import checkpoints

    assert set(checkpoints.__all__) >= {"resolve", "load_config", "load_params", "load_tokenizer", "load_stop_ids"}


def test_nothing_is_looked_for_in_the_repository():
    """What is installed is the packages: no file of theirs names one beside them, such as a test's."""
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith(("tests/", "colab/", "docs/")), f"{module}: {node.value}"


def test_init_files_only_reexport():
    """Of jaxspec's rooms: nothing to look for in an __init__."""
    for path in (ROOT / "jaxspec").glob("*/__init__.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        statements = tree.body[ast.get_docstring(tree) is not None :]
        assert all(isinstance(statement, ast.ImportFrom) for statement in statements), path
