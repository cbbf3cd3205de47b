"""The package as a whole: what importing costs, what is public, and which way the imports point."""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import inspect
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxspec
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.options.keywords import EngineOptions, GenerateOptions, SamplingOptions
from tests.support.root import ROOT
from tests.support.sizes import cases

PACKAGES = ("jaxspec", "pallas_kernels", "checkpoints")

# A row for each room, the lowest first: what it imports from rooms above its row, all that it does import and no more.
# A room is a package, or one of jaxspec's; of a room of which one module is needed, that module ("jaxspec." left out).
# Every room of jaxspec, and checkpoints, may import `common`.
ARROWS = {
    "pallas_kernels": "",
    "common": "",
    "hardware": "pallas_kernels",
    "parallel": "pallas_kernels.device pallas_kernels._peer_sum",
    "sampling": "",
    "grammars": "",
    "cache": "pallas_kernels.kv_write pallas_kernels.pages hardware.platforms parallel.placement",
    "models": "pallas_kernels parallel.mailbox parallel.placement cache",
    "drafters": "pallas_kernels sampling.rng cache models",
    "verify": "pallas_kernels.plain sampling.rng drafters.base",
    "options": "drafters.methods verify.rules grammars.requests",
    "decode": "pallas_kernels.plain sampling cache models drafters verify options.engine",
    "runtime": "pallas_kernels.lowering hardware.platforms parallel.placement sampling cache.pages drafters.base "
    "decode",
    "engine": "pallas_kernels hardware.platforms parallel sampling grammars cache models drafters verify.rules options "
    "decode.state runtime",
    "checkpoints": "pallas_kernels.weights models.config models.draft_spec models.families models.layer_config "
    "models.limits models.parameters models.reading models.rope options.quantization",
    "loading": "pallas_kernels checkpoints hardware.platforms parallel.placement models drafters options "
    "runtime.program_files",
    "api": "pallas_kernels.device checkpoints parallel models grammars options runtime engine loading",
    # __init__: for types only, public names are loaded on first use
    "jaxspec": "parallel.hosts options engine.metrics api",
    "bench": "pallas_kernels checkpoints hardware.platforms parallel.placement cache models drafters verify.rules api "
    "options decode runtime engine loading",
    "inspect": "pallas_kernels.device checkpoints hardware parallel.placement cache models options "
    "engine loading bench.presets",
    "demo": "pallas_kernels.weights checkpoints.names parallel.placement models drafters.methods options "
    "engine.metrics api",
    "train": "pallas_kernels checkpoints hardware.platforms parallel.placement cache.budget models drafters "
    "verify.rules options runtime.compilation_cache engine loading api inspect.fit",
    "server": "grammars.requests options api",
    "cli": "checkpoints hardware.accelerators parallel drafters.methods verify.rules options loading.convert api "
    "bench inspect.info demo train server",
}


def full(name: str) -> str:
    return name if name.split(".")[0] in PACKAGES else f"jaxspec.{name}"


ALLOWED = {full(room): set(map(full, arrows.split())) for room, arrows in ARROWS.items()}
COMMON = "jaxspec.common"
ROOMS = list(ALLOWED)


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
            # `from jaxspec.inspect import info` names a module, `from jaxspec.api.llm import LLM` an object in one.
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
    allowed = ALLOWED[here] | {here} | ({COMMON} if here != "pallas_kernels" else set())
    for name in imported(MODULES[module]):
        fits = any(name == a or name.startswith(a + ".") for a in allowed)
        assert fits, f"{module} imports {name}; {here} may import from {', '.join(sorted(allowed))}"


def test_allowed_is_what_is_used():
    assert ALLOWED.keys() == {room(module) for module in MODULES}
    assert not unused(ALLOWED)
    planted = ALLOWED | {"jaxspec.demo": ALLOWED["jaxspec.demo"] | {"jaxspec.train"}}
    assert unused(planted) == {("jaxspec.demo", "jaxspec.train")}, "the test sees none any more"


def test_no_arrow_points_up():
    """A room imports from the rooms above its row only."""
    for i, arrows in enumerate(ALLOWED.values()):
        assert {room(name) for name in arrows} <= set(ROOMS[:i]), ROOMS[i]


def test_nothing_is_loose():
    """Every file of jaxspec stands in a room."""
    hall = {path.name for path in (ROOT / "jaxspec").iterdir() if path.is_file()}
    assert hall == {"__init__.py", "py.typed"}


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
    graph["jaxspec.common.values"].add("jaxspec.options.engine")
    assert set(circle(graph)) == {"jaxspec.common.values", "jaxspec.options.engine"}, "the test sees none any more"


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as found:
        return found.args[1]
    return []


LONGEST = 320  # lines of a file of jaxspec


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("jaxspec")])
def test_a_file_is_short(module):
    """A second idea has a file of its own."""
    assert len(MODULES[module].read_text(encoding="utf-8").splitlines()) <= LONGEST


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


PLAIN = {"ValueError", "NotImplementedError"}
FAULTS = {"jaxspec.cache.allocator"}  # whose ValueErrors no input can cause


def raised(source: str) -> set[str]:
    """What is raised by name in a source."""
    raises = [node.exc for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise) and node.exc]
    return {ast.unparse(exc.func if isinstance(exc, ast.Call) else exc) for exc in raises}


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("pallas_kernels")])
def test_what_is_refused_is_told_from_what_goes_wrong(module):
    """A refusal is a UserError or an UnsupportedError: the command line takes any other ValueError for a fault."""
    assert bool(raised(MODULES[module].read_text(encoding="utf-8")) & PLAIN) == (module in FAULTS)


def test_the_classes_of_refusals_fit_what_people_catch():
    assert issubclass(UserError, ValueError)
    assert issubclass(UnsupportedError, (UserError, NotImplementedError))
    assert raised("raise ValueError(1)\nraise NotImplementedError\nraise") == PLAIN


def test_policy_has_no_device_array():
    """Of the engine, the runner has them, and what sets it up; the others import nothing of jax that makes or reads
    one. A mesh is named to be handed on."""
    seen = {}
    for module, path in MODULES.items():
        if module.startswith("jaxspec.engine."):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            named = {f"{n.module}.{a.name}" for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}
            named |= {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
            seen[module.split(".")[-1]] = {name for name in named if name.split(".")[0] == "jax"}
    assert "jax" in seen.pop("runner"), "the test sees none any more"
    assert all(names <= {"jax.sharding.Mesh"} for names in seen.values()), seen


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cases(
    "first",
    [*PACKAGES, "jaxspec.api.llm", "jaxspec.cli", "jaxspec.decode.round"],
    quick=["jaxspec.api.llm"],
)
def test_any_module_may_be_imported_first(first):
    run(f"import {first}; import checkpoints; from jaxspec import LLM")


def test_import_is_light():
    """jax and the engine are loaded when they are needed, so that `jaxspec --help` answers at once."""
    heavy = ["jax", "jaxlib", "flax", "numpy", "transformers", "matplotlib", "huggingface_hub", "fastapi", "openai"]
    heavy += ["jaxspec.engine", "jaxspec.api.llm", "jaxspec.loading.drafts", "checkpoints"]
    code = f"import sys, jaxspec, jaxspec.cli; print(sorted(set({heavy!r}) & set(sys.modules)))"
    assert run(code).strip() == "[]"


def test_public_names():
    assert set(jaxspec.__all__) >= {"LLM", "AsyncLLM", "SamplingParams", "SpeculativeConfig", "EngineConfig"}
    assert set(jaxspec.__all__) >= {"RequestOutput", "CompletionOutput", "SpecDecodeMetrics", "StreamOutput", "Logprob"}
    assert set(jaxspec.__all__) >= {"generate", "join_hosts", "UserError", "__version__"}
    assert len(jaxspec.__all__) <= 15
    for name in jaxspec.__all__:
        assert getattr(jaxspec, name) is not None
        assert name in dir(jaxspec)
    with pytest.raises(AttributeError, match="no attribute 'LLm'; public names: LLM, AsyncLLM"):
        jaxspec.LLm  # noqa: B018
    import checkpoints

    assert set(checkpoints.__all__) >= {"resolve", "load_config", "load_params", "load_tokenizer", "load_stop_ids"}


def test_editors_see_the_public_names():
    """What __init__ imports for types is what it loads on first use; and the packages say that they have types."""
    types = [
        n for n in ast.walk(ast.parse((ROOT / "jaxspec/__init__.py").read_text())) if isinstance(n, ast.ImportFrom)
    ]
    seen = {
        alias.asname: f"{n.module}.{alias.name}" for n in types if n.module.startswith("jaxspec.") for alias in n.names
    }
    assert seen.pop("__version__") == "jaxspec.common.package.VERSION"
    assert seen == {name: f"{module}.{name}" for name, module in jaxspec._PUBLIC.items()}
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize(
    ("keywords", "cls"), [(EngineOptions, jaxspec.EngineConfig), (SamplingOptions, jaxspec.SamplingParams)]
)
def test_editors_see_the_options(keywords, cls):
    assert typing.get_type_hints(keywords) == {
        field.name: typing.get_type_hints(cls)[field.name] for field in dataclasses.fields(cls)
    }


@pytest.mark.parametrize("call", [jaxspec.LLM, jaxspec.AsyncLLM, jaxspec.generate])
def test_calls_name_their_options(call):
    *_, options = inspect.signature(call).parameters.values()
    wanted = GenerateOptions if call is jaxspec.generate else EngineOptions
    assert (options.kind, options.annotation) == (options.VAR_KEYWORD, f"Unpack[{wanted.__name__}]")


@pytest.mark.thorough  # where mypy has not seen jaxspec before
def test_type_checkers_see_what_editors_see(tmp_path):
    """The classes themselves, the options of calls, and what has no such name."""
    api = pytest.importorskip("mypy.api")
    (tmp_path / "use.py").write_text(
        "import jaxspec\n"
        "from jaxspec import LLM, AsyncLLM, Logprob, StreamOutput, generate\n"
        "llm = LLM('m', max_num_seqs=4)\n"
        "reveal_type(llm.generate('x')[0].outputs[0].logprobs)\n"
        "reveal_type(generate('m', 'x', max_new_tokens=3)[0].finished)\n"
        "LLM('m', max_num_seq=4)\n"
        "AsyncLLM('m', max_num_seqs='four')\n"
        "jaxspec.Llm\n"
    )
    out, err, _ = api.run(["--config-file", str(ROOT / "pyproject.toml"), "--no-pretty", str(tmp_path / "use.py")])
    for line in (
        '4: note: Revealed type is "list[dict[int, jaxspec.api.outputs.Logprob]] | None"',
        '5: note: Revealed type is "bool"',
        '6: error: Unexpected keyword argument "max_num_seq" for "LLM"; did you mean "max_num_seqs"?',
        '7: error: Argument "max_num_seqs" to "AsyncLLM" has incompatible type "str"; expected "int"',
        '8: error: Module has no attribute "Llm"',
    ):
        assert line in out.replace("builtins.", ""), out + err


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


DECODED = {"Of", "What", "Where", "That", "As", "Whether", "How", "Why", "By", "Into", "It"}


@pytest.mark.parametrize("module", MODULES)
def test_a_docstring_begins_with_a_verb_or_a_noun(module):
    """Other first words stand for a subject that the reader has to guess."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    assert not [text for text in texts if text and text.split()[0] in DECODED]
