"""Entry point of `python -m jaxspec.cli`, which runs the command line."""

from jaxspec.cli import main

main()
