"""Acceptance rules, which decide how many draft tokens of a round are accepted. Each rule has its own file."""
