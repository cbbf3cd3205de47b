"""Names of the models that come with jaxspec: the defaults where no model is named."""

from __future__ import annotations

MODEL = "smollm2-135m-instruct"  # its weights are in a Python package: no hub is asked
DRAFT = "smollm2-135m-eagle3"  # a head trained for MODEL, in a folder of this package
METHOD = "ngram+eagle3"  # the method that uses this pair
