"""What README and docs say can be done: examples run, and every command, target, link, file and test exists."""

from __future__ import annotations

import re
import shlex
import tomllib

import pytest

from jaxspec.common.package import DISTRIBUTION
from tests.support.documents import CURRENT, PAGES, ROOT, anchors, blocks, commands, links, prose, text_of
from tests.support.model_folders import write_model
from tests.support.sizes import cases

EXAMPLES = [(page, i) for page in PAGES for i in range(len(blocks(page, "python")))]
SERVED = "http://127.0.0.1:8000"  # where examples find a server
LANGUAGES = {"", "python", "mermaid", "text"}  # text: no example
EXTRAS = set(tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("docs") / "tiny")


@pytest.fixture(scope="module")
def server(tiny):
    """A server of it, for the examples that are clients."""
    from jaxspec import AsyncLLM
    from tests.server.running import Running

    llm = AsyncLLM(str(tiny), max_num_seqs=2)
    running = Running(llm, served_model_name=str(tiny))
    yield running
    running.stop()
    llm.shutdown()


@cases(("page", "number"), EXAMPLES, quick=[example for example in EXAMPLES if example[0] != "docs/serving.md"])
def test_python_examples_run(page, number, tiny, capsys, request):
    """With a tiny model under the real one's name."""
    example = blocks(page, "python")[number]
    if SERVED in example:
        example = example.replace(SERVED, request.getfixturevalue("server").url)
    code = compile(example.replace("smollm2-135m-instruct", str(tiny)), page, "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() or "assert" in example


def test_examples_are_found():
    assert {page for page, _ in EXAMPLES} >= {"README.md", "docs/serving.md", "docs/extending.md"}
    for page in PAGES:
        shown = re.findall(r"^ *```(\w+)$", text_of(page), re.MULTILINE)
        assert set(shown) <= LANGUAGES, page


def test_the_first_example_is_ten_lines():
    example, *_ = blocks("README.md", "python")
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 10


def test_the_readme_is_short():
    """What grows goes to docs."""
    assert len((ROOT / "README.md").read_bytes()) <= 7_000


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page):
    """With the options and values that they are shown with; nothing is run."""
    import click
    import typer.main

    from jaxspec.cli.app import app

    group = typer.main.get_command(app)
    for _, *words in commands(page, "jaxspec"):
        if words in ([], ["--version"]):  # the name alone, in a sentence; or an answer without a command
            continue
        with click.Context(group) as context:
            name, command, rest = group.resolve_command(context, words)
            if rest:  # or it is the command's name alone, in a sentence
                command.make_context(name, list(rest), parent=context)


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+(?:-[a-z]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {words[1] for words in commands("README.md", "make")} >= {"demo", "test"}
    for page in PAGES:
        for _, target, *arguments in commands(page, "make"):
            assert target in targets, page
            for word in shlex.split(" ".join(arguments).removeprefix("ARGS=")):
                if word.startswith("tests/"):
                    assert (ROOT / word).is_file(), (page, word)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(str(target.relative_to(ROOT))), link


def test_every_page_is_in_the_index():
    """Of docs, and of the notes."""
    for index in ("docs/README.md", "docs/notes/README.md"):
        folder = (ROOT / index).parent
        shown = {(folder / link.partition("#")[0]).resolve() for link in links(index)}
        assert {path.resolve() for path in folder.glob("*.md")} - shown == {(ROOT / index).resolve()}


@pytest.mark.parametrize("page", CURRENT)
def test_named_files_and_extras_exist(page):
    text = text_of(page)
    for path in re.findall(r"`((?:jaxspec|tests|checkpoints|pallas_kernels|docs|\.ci)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    assert extras_in(text) <= EXTRAS


def extras_in(text: str) -> set[str]:
    """The extras that a text names: `.[serve]`, `jaxspec-decoding[plots,ray]` and, in code, `remedy("serve")`."""
    listed = re.findall(rf"(?:\.|{DISTRIBUTION})\[([\w,]+)\]", text) + re.findall(
        r"""\b(?:remedy|extra)\(["'](\w+)""", text
    )
    return {extra for names in listed for extra in names.split(",")}


def test_extras_named_in_code_and_makefile_exist():
    """And by the distribution's name, which the extras themselves use, too."""
    named = set()
    for path in [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci/run", *(ROOT / "jaxspec").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\bjaxspec\[\w", text), f"{path}: the distribution is {DISTRIBUTION}"
        named |= extras_in(text) | set(re.findall(r"^\S+: EXTRAS := \[(\w+)\]", text, re.MULTILINE))
    assert named <= EXTRAS
    assert named >= {"serve", "metrics", "plots", "ray", "docs"}, "the test sees none any more"
    assert extras_in("pip install '.[srve]'") == {"srve"}


def test_files_named_in_comments_exist():
    """Code points to the notes by page."""
    for package in ("jaxspec", "pallas_kernels", "checkpoints"):
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".md"):
                for page in re.findall(r"(?<![\w/])docs/[\w./-]+\.md", path.read_text(encoding="utf-8")):
                    assert (ROOT / page).is_file(), (path, page)


def test_public_names():
    import jaxspec

    for page in PAGES:
        for names in re.findall(r"^from jaxspec import ([\w, ]+)", text_of(page), re.MULTILINE):
            assert set(names.split(", ")) <= set(jaxspec.__all__), page


@pytest.mark.parametrize("page", PAGES)
def test_no_counts_that_rot(page):
    """How many tests there are is for CI to say."""
    assert not re.findall(r"\b\d[\d,]*\s+(?:[\w-]+\s+)?tests?\b", prose(page))


def rows_of(page: str, first: str) -> list[list[str]]:
    """Return the rows, as cells, of the tables of a page whose first column has this heading."""
    found: list[list[str]] = []
    inside = False
    for line in text_of(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        inside = bool(cells) and (inside or cells[0] == first)
        if inside and cells[0] != first and set(cells[0]) != {"-"}:
            found.append(cells)
    return found


def test_each_question_is_one_click_from_the_readme():
    questions = re.findall(r"^## (.+\?)$", text_of("docs/start.md"), re.MULTILINE)
    assert len(questions) >= 7
    shown = dict(re.findall(r"\[([^\]]+)\]\(docs/start\.md#([\w-]+)\)", text_of("README.md")))
    assert list(shown) == questions


def test_memory_of_the_presets_is_as_computed():
    from jaxspec.bench.presets import preset
    from jaxspec.hardware.chips import chips
    from jaxspec.inspect.fit import Wanted, fit

    rows = rows_of("docs/start.md", "preset")
    assert len(rows) >= 8
    for name, *shown in rows:
        model = preset(name.strip("`"))
        narrow, wide = (fit(Wanted(model, None, chips("H200:1"), dtype=dtype)) for dtype in ("bfloat16", "float32"))
        cache = narrow.target_page / narrow.page_size
        computed = [f"{narrow.target_weights / 1e9:.2f}", f"{wide.target_weights / 1e9:.2f}", f"{cache / 1e3:.0f}"]
        assert shown == computed, name


def test_the_bound_for_a_tpu_is_as_computed():
    """The bytes of weights in a plain step, in each of the head's K passes, and in what the head computes once."""
    import jax.numpy as jnp

    from jaxspec.bench.presets import preset
    from jaxspec.models.config import ModelConfig
    from jaxspec.models.decoder import abstract_params, weight_bytes
    from jaxspec.models.draft_spec import draft_spec
    from jaxspec.parallel.placement import make_placement

    def gigabytes(config: ModelConfig, **which) -> float:
        return weight_bytes(config, abstract_params(config, jnp.bfloat16, make_placement()), **which) / 1e9

    target = preset("qwen3-4b")
    head = preset("eagle3", target)
    plain = gigabytes(target)
    each = gigabytes(head, without=draft_spec(head).features_from)
    once = gigabytes(head) - each
    said = f"reads {plain:.2f} GB for a plain step, and {plain:.2f} + 4 x {each:.2f} + {once:.2f} GB for a round"
    assert said in text_of("docs/start.md")
    for page in ("README.md", "docs/start.md"):
        assert f"at most {3.0 * plain / (plain + 4 * each + once):.1f} |" in text_of(page), page


def test_benchmarks_have_one_figure_a_cell():
    """Earlier figures are in the notes."""
    for line in text_of("docs/benchmarks.md").splitlines():
        if line.startswith("|"):
            cells = re.sub(r"`[^`]+`", "", line)
            assert not re.search(r"\b(before|later|earlier|since)\b", cells), line


def test_figures_of_the_readme_are_those_of_the_pages():
    """So that no figure of another day stays there."""
    section = text_of("README.md").split("## How much faster")[1].split("\n## ")[0]
    shown, *known = (
        set(re.findall(r"\d[\d,]*\.?\d+", text))
        for text in (section, text_of("docs/benchmarks.md"), text_of("docs/start.md"))
    )
    assert len(shown) > 20
    assert shown <= set.union(*known)
