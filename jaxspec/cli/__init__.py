"""The command line, with a file for each command."""

from jaxspec.cli.app import main as main
