"""Drafters: the methods that propose draft tokens, one file each."""
