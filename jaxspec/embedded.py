"""The models that come with jaxspec, by name: what is used where nobody names one."""

from __future__ import annotations

MODEL = "smollm2-135m-instruct"  # its weights come out of a package, no hub is asked
DRAFT = "smollm2-135m-draft"  # trained for it, a folder of this package
