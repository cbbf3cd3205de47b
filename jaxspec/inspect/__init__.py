"""Descriptions of a model and of the memory that it needs, for the command `jaxspec info`."""
