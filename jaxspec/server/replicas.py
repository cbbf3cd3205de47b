"""Replicas of a server on Ray Serve, each with its own engine. Needs jaxspec's extra "ray"."""

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

ANYWHERE = "0.0.0.0"  # Ray's proxies listen, at addresses that a replica does not know
SPARE = 64  # requests that a full replica is sent, to answer 429


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
    """An application for ray.serve.run: at least min_replicas servers of a model, and more, up to max_replicas, while
    requests wait on those that there are. Where they listen is said to Ray: host and port of the config are not used.

    ray_actor_options: what a replica takes, such as {"num_gpus": 1}.
    model, speculative_config, options: as of AsyncLLM; a replica makes one when it starts, which warms up unless told
      otherwise.

    A replica that is not needed any more finishes what runs, for config.drain_timeout seconds at most. One whose engine
    has failed is replaced. jaxspec.server.ray_proxy has the errors of Ray's own proxy in OpenAI's form.
    """
    config = dataclasses.replace(config or ServerConfig(), host=ANYWHERE)
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
            "target_ongoing_requests": rows,  # more than there are rows wait
        },
        graceful_shutdown_timeout_s=config.drain_timeout,
    )
    return deployment.bind()


class Replica:
    """One of them. Its application, and that application's AsyncLLM, are made where it runs."""

    app: FastAPI

    async def check_health(self) -> None:
        """Called by Ray, which replaces a replica where this raises."""
        await self.app.state.served.llm.check_health()
