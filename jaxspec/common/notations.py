"""Parts of notations that both grammars and readers of outputs use."""

from __future__ import annotations

import re

GEMMA_QUOTE = '<|"|>'  # stands before and after a string in the calls of Gemma 4; a string has no escapes
# Names of members that Gemma 4 writes without quotes.
GEMMA_NAME = re.compile(r"[^\s:,{}\[\]<>\"]+(?: [^\s:,{}\[\]<>\"]+)*")
