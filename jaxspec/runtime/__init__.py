"""Compiled programs, their files, and the plans that run them."""
