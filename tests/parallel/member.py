"""What a process of a test's job runs: python -m tests.parallel.member serve|fail|read HOST:PORT PROCESSES WHICH ..."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax

import checkpoints
from checkpoints import gguf, safetensors
from jaxspec import LLM, SamplingParams, UserError, join_hosts
from jaxspec.models.decoder import abstract_params
from jaxspec.parallel.placement import make_placement

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "page_size": 4,
    "num_pages": 24,  # too few for four: some are preempted
    "max_model_len": 64,
    "compilation_cache": False,
}
PROMPTS = [[1, *(7 * i + j for j in range(1 + 5 * i % 17))] for i in range(8)]
LATER = [[1, 300, 299], [1, 298]]
SHORT = {"max_tokens": 16, "ignore_eos": True}
KINDS = ({"temperature": 0.0}, {"seed": 5, "temperature": 0.8}, {"temperature": 0.0, "frequency_penalty": 0.7})
ABORTED = (2, 5)


def serve(llm: LLM) -> dict[str, Any]:
    """Requests of all kinds, of which some are preempted and some aborted, and some that come later."""
    engine = llm.engine
    add = lambda i, prompt: engine.add(prompt, SamplingParams(**SHORT, **KINDS[i % len(KINDS)]))
    requests = [add(i, prompt) for i, prompt in enumerate(PROMPTS)]
    engine.step(2)
    for i in ABORTED:
        engine.abort(requests[i])
    engine.step(2)
    requests += [add(i, prompt) for i, prompt in enumerate(LATER)]
    while engine.busy:
        engine.step(3)
    return {
        "tokens": [r.output for i, r in enumerate(requests) if i not in ABORTED],
        "reasons": [r.finish_reason for r in requests],
        "preemptions": engine.scheduler.num_preemptions,
        "pages": engine.scheduler.allocator.num_free,
        "accepted": engine.metrics.num_accepted_tokens,
    }


def bytes_read(path: str, count: int) -> dict[str, Any]:
    """By this process, for its part of a model's weights, and whose parts it then holds."""
    read = [0]

    def counting(cls: Any) -> None:
        real = cls.read

        def counted(self: Any, *args: Any) -> Any:
            x = real(self, *args)
            read[0] += x.nbytes
            return x

        cls.read = counted

    counting(safetensors.Shards)
    counting(gguf.Weights)
    source = checkpoints.resolve(path)
    config = checkpoints.load_config(source)
    abstract = abstract_params(config, "float32", make_placement(count))
    before = by_system()
    params = checkpoints.load_params(source, config, abstract)
    if source.kind == "orbax":  # which reads with system calls; the others map their files
        read[0] = by_system() - before
    shards = [shard for x in params.values() for shard in x.addressable_shards]
    whole = sum(x.nbytes for x in params.values())
    return {"read": read[0], "held": sum(shard.data.nbytes for shard in shards), "whole": whole}


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    raise AssertionError("it was done")


def by_system() -> int:
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().split()[1])


if __name__ == "__main__":
    task, where, count, rank, *given = sys.argv[1:]
    join_hosts(where, int(count), int(rank), join_timeout=300)
    if task == "read":
        print(json.dumps(bytes_read(given[0], int(count))))
    else:
        options = OPTIONS | json.loads(given[1])
        llm = LLM(given[0], tensor_parallel_size=len(jax.devices()), **options)
        if task == "fail":  # in process 0, where alone the script goes on
            raise RuntimeError("the script's own\nfault")
        again = [lambda: llm.speculating(None), lambda: LLM(given[0], **options), lambda: join_hosts(where, 2, 0)]
        print(json.dumps(serve(llm) | {"refused": list(map(refusal, again))}))
