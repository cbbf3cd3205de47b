"""The name and version of jaxspec's distribution. The rest of the code reads them from here."""

from __future__ import annotations

VERSION = "0.2.0"  # version of the package, which pyproject.toml reads from this line
# Name with which pip installs the package, as in pyproject.toml. On the package index `jaxspec` is another project.
DISTRIBUTION = "jaxspec-decoding"


def remedy(extra: str) -> str:
    """Return the pip command that installs jaxspec with an extra (a named set of optional dependencies)."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
