"""`busy`: tokens per second of our server and of a llama-server while another process takes a core."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from emberkeep.bench.peers import WARM_UP, PeersPlan, counting, rate_row, stream
from emberkeep.bench.report import BenchResult, Table
from emberkeep.bench.servers import PEER, OwnServer, PeerServer, alone, peer_version
from emberkeep.bench.workspace import Workspace
from emberkeep.signals import with_default_signals

_BUSY = """
from time import monotonic
end = monotonic() + 60
while monotonic() < end:
    pass
"""


async def run(workspace: Workspace, plan: PeersPlan) -> BenchResult:
    rates: dict[str, dict[str, list[float]]] = {}
    with OwnServer(workspace, parallel=plan.clients, ctx=plan.context) as ours:
        with ours.pause():
            peer = PeerServer(workspace, plan.peer, parallel=plan.clients, ctx=plan.context)
        with peer:
            for number in range(plan.repeat):
                workspace.say(f"round {number + 1} of {plan.repeat}")
                for clients in (1, plan.clients):
                    samples = rates.setdefault(f"{clients} streams", {})
                    texts = [counting((clients, number, i)) for i in range(clients)]
                    for server in (ours, peer):
                        with alone(server, (ours, peer)):
                            await stream(server.client, texts, min(WARM_UP, plan.answer_tokens))
                            with _busy_process():
                                rate = await stream(server.client, texts, plan.answer_tokens)
                            await server.settle()
                        samples.setdefault(server.name, []).append(rate)
    rows = tuple(rate_row(*one) for one in rates.items())
    title = f"tokens/s, {plan.answer_tokens} tokens each, beside a busy process"
    return BenchResult("busy", (Table(title, rows),), (f"{PEER}: {peer_version(plan.peer)}",))


@contextmanager
def _busy_process() -> Iterator[None]:
    """One core has something else to do, for a minute at most: threads that spin for each other on one core may
    need much longer than that for a few tokens."""
    process = subprocess.Popen(with_default_signals([sys.executable, "-P", "-c", _BUSY]))
    try:
        yield
    finally:
        process.kill()
        process.wait()
