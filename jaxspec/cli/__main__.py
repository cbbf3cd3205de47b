"""`python -m jaxspec.cli` runs the command line."""

from jaxspec.cli import main

main()
