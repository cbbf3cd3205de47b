"""Replicas of a server on Ray Serve, each with its own engine. This module needs jaxspec's extra "ray"."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack

from fastapi import FastAPI
from ray import serve

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.options.engine import EngineConfig
from jaxspec.options.keywords import EngineOptions
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.server.app import make_app
from jaxspec.server.run import gate_of
from jaxspec.server.settings import ServerConfig

# Host in a replica's settings: the replica accepts any Host header, unless allowed_hosts is given. It cannot know the
# addresses at which Ray's proxies listen.
ANY_ADDRESS = "0.0.0.0"
# Largest number of requests that Ray sends to a replica beyond those that may run and wait. They are answered 429.
SPARE = 64


def replicas(
    model: str,
    config: ServerConfig | None = None,
    *,
    min_replicas: int = 1,
    max_replicas: int = 1,
    ray_actor_options: Mapping[str, Any] | None = None,
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
    **options: Unpack[EngineOptions],
) -> serve.Application:
    """Return an application for ray.serve.run that serves a model with one or more replicas.

    There are at least min_replicas, and up to max_replicas while requests wait. Host and port are options of Ray; the
    host and port of `config` are not used.

    A replica that is no longer needed finishes its requests, for at most config.drain_timeout seconds. A replica whose
    engine has failed is replaced. jaxspec.server.ray_proxy gives the errors of Ray's own proxy OpenAI's form.

    Args:
      model: As in AsyncLLM. Each replica makes an AsyncLLM when it starts.
      config: The server's settings.
      min_replicas: Smallest number of replicas.
      max_replicas: Largest number of replicas.
      ray_actor_options: Resources of a replica, such as {"num_gpus": 1}.
      speculative_config: As in AsyncLLM.
      **options: As in AsyncLLM, but warm_up is True by default.
    """
    config = dataclasses.replace(config or ServerConfig(), host=ANY_ADDRESS)
    engine = EngineConfig(**{"warm_up": True} | options)
    rows = engine.max_num_seqs

    def build() -> FastAPI:
        llm = AsyncLLM(model, speculative_config=speculative_config, **dataclasses.asdict(engine))
        return make_app(llm, config, config.served_model_name or model, gate_of(llm, config))

    deployment: Any = serve.deployment(
        serve.ingress(build)(Replica),
        name="jaxspec",
        ray_actor_options=dict(ray_actor_options or {}),
        max_ongoing_requests=rows + config.max_queue + SPARE,
        autoscaling_config={
            "min_replicas": min_replicas,
            "max_replicas": max_replicas,
            "target_ongoing_requests": rows,  # Ray adds replicas while each has more requests than rows in its batch
        },
        graceful_shutdown_timeout_s=config.drain_timeout,
    )
    application: serve.Application = deployment.bind()
    return application


class Replica:
    """A replica of the server. Ray makes its application and its AsyncLLM in the replica's own process."""

    app: FastAPI

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine has failed. Ray calls this method, and replaces a replica that fails it."""
        await self.app.state.served.llm.check_health()
