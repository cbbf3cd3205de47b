"""Descriptions of a model and the memory that it needs."""
