"""Grammars: what a request's output may be, as automata over token ids."""
