"""A server that runs for hours: after 50,000 short requests it uses as much memory and as many files as after 5,000."""

from __future__ import annotations

import concurrent.futures
import gc
import http.client
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.server.running import MODEL, wait

REQUESTS, SAMPLES, CLIENTS = 50_000, 10, 16
MIB = 1 << 20


def held(llm) -> dict[str, float]:
    """Return what the process and the engine hold now: bytes, counts of files, threads and entries of tables."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    scheduler = llm.llm.engine.scheduler
    return {
        "MiB": pages * os.sysconf("SC_PAGESIZE") / MIB,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "programs": len(llm.llm.engine.runner.programs.compiled),
        "registered pages": len(scheduler.allocator.page_of),
        "undrafted": len(scheduler.undrafted),
        "objects": len(gc.get_objects()),
    }


def send(port: int, seed: int, count: int) -> int:
    """Send `count` completions over one connection, one after the other. Return the number of answers."""
    rng = np.random.default_rng(seed)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    done = 0
    for i in range(count):
        asked = {
            "model": MODEL,
            "prompt": rng.integers(1, 60, rng.integers(4, 40)).tolist(),  # token ids: nearly every prompt is new
            "max_tokens": 2,
            "temperature": float(i % 2),
            "user": f"{seed} {i}",
            **({"stop": ["zz"]} if i % 5 == 0 else {}),
            **({"logprobs": 1} if i % 7 == 0 else {}),
        }
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        done += 1
    connection.close()
    return done


@pytest.mark.thorough
@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_what_a_server_holds_stays_bounded(server, llm):
    """The first tenth fills caches and tables. From there on nothing may grow."""
    curve = []
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        each = REQUESTS // SAMPLES // CLIENTS
        for part in range(SAMPLES):
            done = pool.map(lambda i, part=part: send(server.port, CLIENTS * part + i, each), range(CLIENTS))
            assert sum(done) == each * CLIENTS
            wait(lambda: not server.gate.inside)
            curve.append(held(llm))
            print((part + 1) * each * CLIENTS, curve[-1], flush=True)
    first, last = curve[0], curve[-1]
    grown = {name: last[name] - first[name] for name in first}
    assert grown["MiB"] < 16, "0.4 KB a request would be more"
    assert grown["files"] <= CLIENTS
    assert grown["threads"] <= CLIENTS
    assert last["programs"] == first["programs"]
    assert last["registered pages"] <= llm.llm.engine.num_pages
    assert grown["objects"] < REQUESTS / 10
