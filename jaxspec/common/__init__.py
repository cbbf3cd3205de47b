"""Errors, value checks, progress and files, for use by all other packages."""
