"""Errors, checks of values, progress bars and file access, which all other packages use."""
