"""Names of the models that come with jaxspec. They are the defaults of commands in which no model is named."""

from __future__ import annotations

MODEL = "smollm2-135m-instruct"  # target model, whose weights are in a Python package: no hub is contacted
DRAFT = "smollm2-135m-eagle3"  # draft head that was trained for MODEL, in a folder of this package
METHOD = "ngram+eagle3"  # speculation method that uses MODEL with DRAFT
