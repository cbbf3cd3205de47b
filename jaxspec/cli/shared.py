"""Options and helper functions that several commands share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from jaxspec.cli.fields import CommandOption, Fields, sentences
from jaxspec.common import progress
from jaxspec.common.errors import UserError
from jaxspec.common.package import remedy
from jaxspec.options.engine import EngineConfig
from jaxspec.parallel import hosts
from jaxspec.parallel.hosts import Hosts

MODEL_HELP = "Hub id, local folder, .gguf file, or an embedded model's name."
DTYPE_HELP = sentences(EngineConfig)["dtype"]

# Differences of options from the fields of the option classes. They are the same in all commands.
OWN = {
    "num_speculative_tokens": CommandOption(flags=("-k", "--num-speculative-tokens"), default=None),
    "tokenizer": CommandOption(help="Model or folder with the tokenizer, if the model has none."),
    "revision": CommandOption(help="Revision of the model at the hub."),
    "num_pages": CommandOption(
        help="Pages in the pool; default: as many as --memory-utilization of the free memory holds."
    ),
    "memory_utilization": CommandOption(
        help="Share of the device's memory that weights, pages and temporary memory take."
    ),
    "enable_prefix_caching": CommandOption(flags=("--enable-prefix-caching/--no-enable-prefix-caching",)),
    "compilation_cache": CommandOption(flags=("--compilation-cache/--no-compilation-cache",)),
    "wait_for_warm_up": CommandOption(flags=("--wait-for-warm-up/--no-wait-for-warm-up",)),
}
UNSUPPORTED = ("enable_lora", "pipeline_parallel_size")  # EngineConfig refuses these fields, so no command offers them
ENGINE = tuple(field.name for field in dataclasses.fields(EngineConfig) if field.name not in UNSUPPORTED)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
HostOptions = Annotated[dict[str, Any], Fields(Hosts, tuple(field.name for field in dataclasses.fields(Hosts)))]


def join(given: dict[str, Any]) -> bool:
    """Join the job of several processes, if these options or the environment describe one.

    given: values of the fields of Hosts.

    Returns: whether this process serves requests and prints: it is process 0, or the only one.
    """
    hosts.join(Hosts(**given))
    others = hosts.peers()
    if others is None:
        return True
    # Libraries for communication between processes write to file descriptor 1, which here becomes standard error. The
    # command's own output goes to standard output through another descriptor.
    stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(stdout, "w", encoding=sys.stdout.encoding)
    progress.quiet = others.rank > 0
    return others.rank == 0


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Return a context for importing packages of one of jaxspec's optional extras. name: the extra, such as "serve".

    Raises: UserError if a package that is imported inside the context is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise UserError(f"this command needs {error.name or error}: {remedy(name)}") from None
