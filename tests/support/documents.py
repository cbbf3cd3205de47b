"""What README and docs hold: pages, their fenced blocks, code within the text, command lines, links and anchors."""

from __future__ import annotations

import re
import shlex
import textwrap

from tests.support.root import ROOT

TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = (*TOP, *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
NOTES = tuple(page for page in PAGES if page.startswith("docs/notes/"))  # their commands were run then
CURRENT = tuple(page for page in PAGES if page not in NOTES)
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a language, unindented."""
    found: list[str] = []
    inside: tuple[str, list[str]] | None = None  # the language and the lines of an open block
    for line in text_of(page).splitlines():
        if fence := re.fullmatch(r" *```(\w*)", line):
            if inside is None:
                inside = (fence[1], [])
                continue
            if inside[0] == language:
                found.append(textwrap.dedent("\n".join(inside[1]) + "\n"))
            inside = None
        elif inside is not None:
            inside[1].append(line)
    assert inside is None, f"{page}: a block is not closed"
    return found


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return FENCED.sub("", text_of(page))


def commands(page: str, program: str) -> list[list[str]]:
    """Every command line of `program` in the page's blocks and code spans, split into words."""
    spans = re.findall(r"`([^`\n]+)`", prose(page))
    lines = [line.lstrip(" !") for block in blocks(page, "") for line in block.splitlines()] + spans
    return [shlex.split(line, comments=True) for line in lines if re.match(rf"{program}( |$)", line)]


def links(page: str) -> list[str]:
    """The targets of links to other files or to headings, not to other sites."""
    return re.findall(r"\]\((?!https?://)([^)\s]+)\)", prose(page))


def anchors(page: str) -> set[str]:
    """What a link may name of a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
