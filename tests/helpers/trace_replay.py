"""A trace of blocks, sent to a real server in its own time: what the simulator says of it can be checked."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import numpy as np

from benchmarks.trace_file import Visit

BLOCK_IDS = 128
"""A block of a trace stands for 512 tokens; here it is one chunk of a store, so that shares are the same."""


@dataclass(slots=True)
class Replayed:
    prompt: int = 0
    cached: int = 0
    remote: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def own_share(self) -> float:
        return (self.cached - self.remote) / self.prompt

    @property
    def remote_share(self) -> float:
        return self.remote / self.prompt


def prompt_of(visit: Visit) -> list[int]:
    """Printable ids, the same for the same block."""
    parts = [np.random.default_rng(block).integers(32, 127, BLOCK_IDS) for block in visit.blocks]
    return [int(token) for part in parts for token in part]


def replay(url: str, visits: Sequence[Visit], clients: int = 32) -> Replayed:
    """Each request when its time has come. Blocks until all are answered."""
    replayed, begin = Replayed(), time.monotonic()

    def ask(visit: Visit) -> None:
        time.sleep(max(begin + visit.at - time.monotonic(), 0.0))
        with httpx.Client(timeout=120, verify=False) as http:
            body = {"prompt": prompt_of(visit), "max_tokens": 1, "temperature": 0}
            answer = http.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        with replayed.lock:
            replayed.prompt += told["usage"]["prompt_tokens"]
            replayed.cached += told["usage"]["prompt_tokens_details"]["cached_tokens"]
            replayed.remote += told["emberkeep"]["reused"]["remote"]

    with ThreadPoolExecutor(clients) as threads:
        for done in [threads.submit(ask, visit) for visit in sorted(visits, key=lambda one: one.at)]:
            done.result()
    return replayed
