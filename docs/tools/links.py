"""Hook of MkDocs: brings in pages that stand outside docs/, and has links work in the site as in the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# File of the repository -> page of the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "colab/README.md": "notebooks.md",
    "checkpoints/smollm2-135m-eagle3/README.md": "head.md",
}
SOURCES = {page: source for source, page in OUTSIDE.items()}
INDEX = "docs/README.md"  # the list of pages; in the site this is the navigation beside the first page
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    from mkdocs.structure.files import File

    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    return rewritten(markdown, page.file.src_uri)


def rewritten(markdown: str, page: str) -> str:
    """Return a page's text with the links of its file in the repository rewritten for the site.

    A link to a file that is no page of the site, such as a source file, is replaced by its text: the site does not hold
    the file, and the repository has no address.
    """
    source = SOURCES.get(page, f"docs/{page}")

    def new(link: re.Match[str]) -> str:
        image, text, path, anchor = link.groups(default="")
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = "index.md" if found == INDEX else OUTSIDE.get(found)
        if target is None and found.startswith("docs/"):
            target = found.removeprefix("docs/")
        if target is None and (ROOT / found).exists():
            return text
        target = target or path  # of a missing file: MkDocs reports it
        return f"{image}[{text}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{anchor})"

    parts = FENCED.split(markdown)
    return "".join(part if i % 2 else LINK.sub(new, part) for i, part in enumerate(parts))
