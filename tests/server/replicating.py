"""Two replicas of the model in a folder, on Ray Serve, until standard input ends.

    python -m tests.server.replicating FOLDER PORT

A process of its own: what Ray starts in one, and how it ends it, is nothing for the other tests there.
"""

from __future__ import annotations

import sys

import ray
from ray import serve

from jaxspec.server.replicas import replicas
from jaxspec.server.settings import ServerConfig
from tests.api.async_llm.calls import OPTIONS
from tests.server.running import MODEL


def main(folder: str, port: int) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        config = ServerConfig(served_model_name=MODEL, drain_timeout=5)
        serve.run(replicas(folder, config, min_replicas=2, max_replicas=2, warm_up=False, **OPTIONS))
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
