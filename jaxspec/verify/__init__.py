"""Acceptance rules: which draft tokens are accepted, one file for each rule."""
