"""The command line of jaxspec, with a file for each command."""

from jaxspec.cli.app import main as main
