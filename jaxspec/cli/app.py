"""The program `jaxspec`: its commands and its entry point."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from jaxspec.cli.bench import bench
from jaxspec.cli.bench_serve import bench_serve
from jaxspec.cli.convert import convert
from jaxspec.cli.demo import demo
from jaxspec.cli.evaluate_draft import evaluate_draft
from jaxspec.cli.exits import leave, status
from jaxspec.cli.fields import as_typer_takes_it
from jaxspec.cli.generate import generate
from jaxspec.cli.generate_data import generate_data
from jaxspec.cli.info import info
from jaxspec.cli.serve import serve
from jaxspec.cli.train_draft import train_draft
from jaxspec.common.package import VERSION
from jaxspec.parallel.absent import leave_out_absent_tpu

# Commands in the order of --help.
COMMANDS = (demo, generate, serve, bench, bench_serve, generate_data, train_draft, evaluate_draft, info, convert)

app = typer.Typer(
    name="jaxspec",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # no markup, because prompts and file names may hold brackets
)


def print_version(wanted: bool) -> None:
    """Print jaxspec's version and end the command. wanted: whether --version is given; else do nothing."""
    if wanted:
        print(f"jaxspec {VERSION}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")]


@app.callback()
def every_command(_: Version = False) -> None:
    """Lossless speculative decoding in one device program."""


for command in COMMANDS:
    app.command()(as_typer_takes_it(command))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and end the process. exits.py lists the exit statuses.

    arguments: words of the command line; by default those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)

    def run() -> None:
        command: Any = typer.main.get_command(app)
        with command.make_context("jaxspec", list(words)) as context:
            if "--help" not in words:
                leave_out_absent_tpu()
            command.invoke(context)

    leave(status(run), at_once=arguments is None)
