"""The models that come with jaxspec, by name: what is used where nobody names one."""

from __future__ import annotations

MODEL = "smollm2-135m-instruct"  # its weights come out of a package, no hub is asked
DRAFT = "smollm2-135m-eagle3"  # a head trained for it, a folder of this package
METHOD = "ngram+eagle3"  # how both are used
