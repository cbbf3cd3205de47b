"""The command `jaxspec serve`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from typing import Annotated, Any

import typer

from jaxspec.cli.exits import STOPPED
from jaxspec.cli.fields import CommandOption, Fields
from jaxspec.cli.shared import ENGINE, MODEL_HELP, HostOptions, extra, join
from jaxspec.cli.shared import OWN as SHARED
from jaxspec.cli.speculation import ConfigOption, DraftOption, DraftOptions, MethodOption, speculation
from jaxspec.common.progress import write_line
from jaxspec.options.engine import EngineConfig
from jaxspec.server.settings import ServerConfig, is_loopback

# Environment variable that holds the API key, because the value of --api-key can be seen in the list of processes.
API_KEY = "JAXSPEC_API_KEY"
SERVER = tuple(field.name for field in dataclasses.fields(ServerConfig))
OWN = SHARED | {
    "warm_up": CommandOption(flags=("--warm-up/--no-warm-up",), default=True),
    "allowed_hosts": CommandOption(
        flags=("--allowed-host",),
        kind=list[str],
        default=None,
        help='A name that requests may have as their Host beside loopback names; "*" allows any. May be repeated.',
        metavar="NAME",
    ),
    "allowed_origins": CommandOption(
        flags=("--allowed-origin",),
        kind=list[str],
        default=None,
        help='Origin of web pages that may use it, such as https://example.com; "*" allows any. May be repeated.',
        metavar="ORIGIN",
    ),
    "page": CommandOption(flags=("--page/--no-page",), default=True),
    "wait_for_warm_up": CommandOption(flags=("--wait-for-warm-up/--no-wait-for-warm-up",), default=False),
    "api_key": CommandOption(
        help=f"API key that clients have to send; the variable {API_KEY} keeps it out of the list of processes."
    ),
}


def serve(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)],
    *,
    draft: DraftOption = None,
    method: MethodOption = None,
    drafts: DraftOptions,
    speculative_config: ConfigOption = None,
    server: Annotated[dict[str, Any], Fields(ServerConfig, SERVER, OWN)],
    engine: Annotated[dict[str, Any], Fields(EngineConfig, ENGINE, OWN)],
    hosts: HostOptions,
) -> None:
    """Serve a model over HTTP, as OpenAI's API."""
    # The options and the socket are checked before the model is loaded.
    speculative = speculation(model, method, draft, drafts, speculative_config)
    config = ServerConfig(**{"api_key": os.environ.get(API_KEY) or None} | server)
    options = EngineConfig(**engine)
    with extra("serve"):
        from jaxspec.server import run
    serves = join(hosts)
    with run.bound(config) if serves else contextlib.nullcontext() as listening:
        from jaxspec.api.async_llm import AsyncLLM

        write_line(f"loading {model} ...")
        llm = AsyncLLM(model, speculative_config=speculative, **dataclasses.asdict(options))
        # In a job of several processes this one is process 0. The others follow it inside AsyncLLM, and end there.
        assert listening is not None
        host, port, *_ = listening.getsockname()
        if not is_loopback(config.host) and not config.api_key:
            write_line(f"everyone who reaches {host} can use this server: --api-key or {API_KEY} requires a key")
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        lines = [f"serving {model} at {url}v1", *([f"a page to try it: {url}"] if config.page else [])]
        number, num_cut = run.serve(llm, config, model, listening, lambda: write_line("\n".join(lines)))
    ending = signal.Signals(number)
    write_line(
        f"{ending.name}: the server has ended, requests cut off after {config.drain_timeout:g} seconds: {num_cut}"
    )
    if num_cut:
        # llm.shutdown is left out, because the engine may be in the middle of a long launch (one device program).
        raise typer.Exit(STOPPED[ending])
    llm.shutdown()
