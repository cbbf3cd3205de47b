"""The distribution's name and version, each written here and nowhere else in the code."""

from __future__ import annotations

VERSION = "0.2.0"  # pyproject.toml reads it here
# The name of an installation for pip, also in pyproject.toml. On the package index `jaxspec` is another project.
DISTRIBUTION = "jaxspec-decoding"


def remedy(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
