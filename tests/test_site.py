"""The documents as a site, as far as it is known without building it: links, pages, pictures, the reference."""

from __future__ import annotations

import re

import pytest

import jaxspec
from docs.tools import links, pictures
from tests.support.documents import PAGES, text_of
from tests.support.root import ROOT

SITE = text_of("mkdocs.yml")


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        (
            "index.md",
            "[a](docs/serving.md#over-http) [b](colab/README.md)",
            "[a](serving.md#over-http) [b](notebooks.md)",
        ),
        ("training.md", "[a](../checkpoints/smollm2-135m-eagle3/README.md)", "[a](head.md)"),
        ("notes/gpu.md", "[a](../benchmarks.md) [b](cpu.md#x)", "[a](../benchmarks.md) [b](cpu.md#x)"),
        ("notes/gpu.md", "[a](../../README.md) [b](../README.md)", "[a](../index.md) [b](../index.md)"),
        ("index.md", "![a](docs/pictures/round.svg)", "![a](pictures/round.svg)"),
        ("notebooks.md", "[a.ipynb](quickstart.ipynb)", "a.ipynb"),  # a file that the site does not hold
        (
            "serving.md",
            "[a](#x) [b](https://arxiv.org/abs/1) [c](no.md)",
            "[a](#x) [b](https://arxiv.org/abs/1) [c](no.md)",
        ),
        ("index.md", "```\n[a](docs/serving.md)\n```", "```\n[a](docs/serving.md)\n```"),
    ],
)
def test_links_are_rewritten(page, text, expected):
    assert links.rewritten(text, page) == expected


def test_every_page_is_in_the_navigation():
    """MkDocs holds it, too; this needs no MkDocs."""
    listed = re.findall(r"^ +- (?:\w+: )?([\w/-]+\.md)", SITE, re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(pages | set(links.OUTSIDE.values()))
    assert all((ROOT / source).is_file() for source in links.OUTSIDE)


def test_warnings_are_errors():
    assert "mkdocs build --strict $(ARGS)" in text_of("Makefile")  # with --quiet none would be counted
    assert "make docs" in text_of(".ci/run")
    for kind in ("not_found", "anchors", "absolute_links", "unrecognized_links", "omitted_files"):
        assert f"{kind}: warn" in SITE, kind


def test_the_reference_has_every_public_name():
    shown = re.findall(r"^::: ([\w.]+)$", text_of("docs/reference.md"), re.MULTILINE)
    assert {f"jaxspec.{name}" for name in jaxspec.__all__} - set(shown) == {"jaxspec.__version__"}


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_what_the_program_draws(name):
    path = pictures.FOLDER / f"{name}.svg"
    assert path.read_text(encoding="utf-8") == str(pictures.PICTURES[name]()), "run `python docs/tools/pictures.py`"
    assert path.stat().st_size < 60_000
    shown = re.compile(rf"^!\[[^\]]{{20,}}\]\((?:docs/|\.\./)?pictures/{name}\.svg\)$", re.MULTILINE)
    assert any(shown.search(text_of(page)) for page in PAGES), (
        "no page shows it, or without words for who cannot see it"
    )


def test_pictures_have_no_others():
    assert {path.stem for path in pictures.FOLDER.glob("*.svg")} == set(pictures.PICTURES)


@pytest.mark.parametrize("shares", pictures.ACCEPTANCE.values())
def test_the_acceptance_that_is_drawn_was_measured(shares):
    card = text_of("checkpoints/smollm2-135m-eagle3/README.md")
    assert re.search(rf"\b{', '.join(map(str, shares))} %|\b{', '.join(map(str, shares))} and", card)
