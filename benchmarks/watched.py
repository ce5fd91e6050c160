"""`watched`: the first token among eight clients, in turns with nobody who watches and with an open page.

In place of the page another process (`python -P benchmarks/watched.py PORT`, until killed) follows the events, and
after each that tells something new, as often as the page does, reads what is kept, the tree and the requests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from time import monotonic

from emberkeep.bench.load import LoadPlan, mixed_ttfts, wait_row
from emberkeep.bench.report import BenchResult, Table
from emberkeep.bench.servers import OwnServer
from emberkeep.bench.workspace import Workspace
from emberkeep.signals import with_default_signals

_EVERY_S = 1.5
_READ = ("/v1/cache?limit=50", "/v1/cache/tree", "/v1/requests?limit=200")


async def run(workspace: Workspace, plan: LoadPlan) -> BenchResult:
    workspace.require_context(plan.context)
    alone, beside = list[list[float]](), list[list[float]]()
    with OwnServer(workspace, parallel=plan.clients) as server:
        for number in range(plan.repeat):
            workspace.say(f"round {number + 1} of {plan.repeat}")
            alone.append(await mixed_ttfts(workspace, server, plan, (number, "alone")))
            with _page_open(server.port):
                beside.append(await mixed_ttfts(workspace, server, plan, (number, "watched")))
    rows = (wait_row("nobody watches", alone), wait_row("page open", beside))
    return BenchResult("watched", (Table(f"{plan.clients} clients", rows),))


@contextmanager
def _page_open(port: int) -> Iterator[None]:
    command = [sys.executable, "-P", __file__, str(port)]
    with subprocess.Popen(with_default_signals(command), stdout=subprocess.PIPE) as watcher:
        try:
            assert watcher.stdout is not None
            watcher.stdout.readline()
            yield
        finally:
            watcher.kill()


def watch(port: int) -> None:
    """Prints a line once it watches. Returns when the server ends the events."""
    events = HTTPConnection("127.0.0.1", port)
    events.request("GET", "/v1/events")
    stream, due, is_new = events.getresponse(), 0.0, True
    for line in stream:
        if is_new:
            print("watching", flush=True)
            is_new = False
        if line.startswith(b"data:") and monotonic() >= due:
            due = monotonic() + _EVERY_S
            for path in _READ:
                _read(port, path)


def _read(port: int, path: str) -> None:
    asked = HTTPConnection("127.0.0.1", port)
    asked.request("GET", path)
    asked.getresponse().read()
    asked.close()


if __name__ == "__main__":
    with suppress(OSError, KeyboardInterrupt):  # the server has gone, or nobody wants to know any more
        watch(int(sys.argv[1]))
