"""The command line: a file a command."""

from jaxspec.cli.app import main as main
