"""jaxspec serve"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from typing import Annotated, Any

import typer

from jaxspec.cli.exits import STOPPED
from jaxspec.cli.fields import Fields, Own
from jaxspec.cli.generate import DRAFTED, Method, speculation
from jaxspec.cli.shared import DRAFT_HELP, MODEL_HELP, HostOptions, extra, join
from jaxspec.config import EngineConfig, SpeculativeConfig
from jaxspec.errors import UserError, quoted
from jaxspec.progress import say
from jaxspec.server.settings import ServerConfig, is_loopback

API_KEY = "JAXSPEC_API_KEY"  # the option would be seen in the list of processes
NOT_YET = ("enable_lora", "pipeline_parallel_size")
ENGINE = tuple(field.name for field in dataclasses.fields(EngineConfig) if field.name not in NOT_YET)
SERVER = tuple(field.name for field in dataclasses.fields(ServerConfig))
OWN = {
    "num_speculative_tokens": Own(flags=("-k", "--num-speculative-tokens"), default=None),
    "tokenizer": Own(help="Where the tokenizer is, if not with the model."),
    "revision": Own(help="The model's, at the hub."),
    "num_pages": Own(help="Pages in the pool; by default what --memory-utilization of the free memory holds."),
    "memory_utilization": Own(help="Part of the free device memory that the pool takes."),
    "enable_prefix_caching": Own(flags=("--enable-prefix-caching/--no-enable-prefix-caching",)),
    "compilation_cache": Own(flags=("--compilation-cache/--no-compilation-cache",)),
    "warm_up": Own(flags=("--warm-up/--no-warm-up",), default=True),
    "allowed_hosts": Own(
        flags=("--allowed-host",),
        kind=list[str],
        default=None,
        help='A name that requests may have as their Host beside loopback names; "*" allows any. May be repeated.',
        metavar="NAME",
    ),
    "allowed_origins": Own(
        flags=("--allowed-origin",),
        kind=list[str],
        default=None,
        help='Origin of web pages that may use it, such as https://example.com; "*" allows any. May be repeated.',
        metavar="ORIGIN",
    ),
    "api_key": Own(
        help=f"What clients have to send as their API key; {API_KEY} in the environment keeps it from view."
    ),
}


def serve(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)],
    *,
    draft: Annotated[str | None, typer.Option(help=DRAFT_HELP)] = None,
    method: Annotated[
        Method | None, typer.Option(help="Default: found out with --draft, both with the embedded pair, else ngram.")
    ] = None,
    drafts: Annotated[dict[str, Any], Fields(SpeculativeConfig, DRAFTED, OWN)],
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="All of speculation's options as an object, as in vLLM.")
    ] = None,
    server: Annotated[dict[str, Any], Fields(ServerConfig, SERVER, OWN)],
    engine: Annotated[dict[str, Any], Fields(EngineConfig, ENGINE, OWN)],
    hosts: HostOptions,
) -> None:
    """Serve a model over HTTP, as OpenAI's API."""
    # Options, and the socket, are checked before the model is loaded.
    speculative = speculation_of(speculative_config, model, method, draft, drafts)
    config, options = ServerConfig(**{"api_key": os.environ.get(API_KEY) or None} | server), EngineConfig(**engine)
    with extra("serve"):
        from jaxspec.server import run
    with run.bound(config) if join(hosts) else contextlib.nullcontext() as listening:
        from jaxspec.async_llm import AsyncLLM

        say(f"loading {model} ...")
        llm = AsyncLLM(model, speculative_config=speculative, **dataclasses.asdict(options))
        assert listening is not None  # else this process has done what another decided, and has ended
        host, port, *_ = listening.getsockname()
        if not is_loopback(config.host) and not config.api_key:
            say(f"whoever reaches {host} can use it: --api-key or {API_KEY} keeps others out")
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        number, num_cut = run.serve(llm, config, model, listening, lambda: say(f"serving {model} at {url}"))
    ending = signal.Signals(number)
    say(f"{ending.name}: the server has ended, requests cut off after {config.drain_timeout:g} seconds: {num_cut}")
    if num_cut:
        raise typer.Exit(STOPPED[ending])  # at once: the engine may be in the middle of something long
    llm.shutdown()


def speculation_of(
    text: str | None, model: str, method: Method | None, draft: str | None, others: dict[str, Any]
) -> SpeculativeConfig | None:
    """What --speculative-config says, or the other options."""
    if text is None:
        return speculation(model, method, draft, others)
    if (method, draft, others) != (None, None, {}):
        given = {"method": method, "draft": draft, **others}
        listed = " and ".join("--" + name.replace("_", "-") for name, value in given.items() if value is not None)
        raise UserError(f"--speculative-config says all of speculation: leave {listed} out")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"--speculative-config {quoted(text)} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f'--speculative-config {quoted(text)} must be an object, such as \'{{"method": "ngram"}}\'')
    return SpeculativeConfig(**found)
