"""Marks of notations that both grammars and readers of outputs use."""

from __future__ import annotations

GEMMA_QUOTE = '<|"|>'  # stands before and after a string in the calls of Gemma 4; a string has no escapes
