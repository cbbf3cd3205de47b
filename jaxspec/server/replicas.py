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

ANY_ADDRESS = "0.0.0.0"  # Ray's proxies listen, at addresses that a replica does not know
SPARE = 64  # requests that Ray sends to a replica beyond its limits, so that the replica can answer 429


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
    """Return an application for ray.serve.run that serves a model with several replicas.

    There are at least min_replicas, and up to max_replicas while requests wait. Host and port are options of Ray; those
    of `config` are not used.

    A replica that is no longer needed finishes its requests, for at most config.drain_timeout seconds. A replica whose
    engine has failed is replaced. jaxspec.server.ray_proxy brings the errors of Ray's own proxy into OpenAI's form.

    Args:
      model: As in AsyncLLM, and so are speculative_config and options. Each replica makes an AsyncLLM when it starts;
        warm_up is True by default.
      config: The server's settings.
      min_replicas: Smallest number of replicas.
      max_replicas: Largest number of replicas.
      ray_actor_options: Resources of a replica, such as {"num_gpus": 1}.
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
            "target_ongoing_requests": rows,  # further requests would wait for a row
        },
        graceful_shutdown_timeout_s=config.drain_timeout,
    )
    return deployment.bind()


class Replica:
    """A replica. Its application and its AsyncLLM are made in the process in which it runs."""

    app: FastAPI

    async def check_health(self) -> None:
        """Raise if the engine has failed. Ray calls this, and replaces the replica if it raises."""
        await self.app.state.served.llm.check_health()
