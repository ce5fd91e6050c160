"""`streams`: tokens per second of many streaming clients, and their first tokens; then of a few in bad company.

The clients are lean: few processes with plain sockets, which count what comes. What they could read at most is
measured first, from a process that sends frames of the same size that lie ready. Company comes when the ordinary
clients have their first tokens: others that read too, others that ask and do not read, others that leave in the
middle and come again, and more requests than there are slots.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from benchmarks import lean_client
from emberkeep.bench.report import BenchResult, Row, Series, Table, Value, percentile, ratios, series
from emberkeep.bench.servers import STATS, BenchClient, OwnServer
from emberkeep.bench.workspace import COMMON, Words, Workspace
from emberkeep.errors import EmberkeepError
from emberkeep.signals import with_default_signals
from emberkeep.types.request import Json
from emberkeep.values import dataclass

_HERE = "127.0.0.1"
_SPARE = 128
_LONGER = 3
"""An answer of the company, in those of ordinary clients."""
_FRAMES = 50_000
_WATCH_S = 0.1
_LINE_BYTES = 64 << 20
_BUDGET = 64 << 20
"""In RAM: a store that fills would look like a leak."""


@dataclass(frozen=True, slots=True)
class StreamsPlan:
    clients: tuple[int, ...] = (1, 8, 16)
    tokens: int = 256
    prompt_tokens: int = 32
    ordinary: int = 8
    """Clients in company, which has as many where it does not wait."""
    waiting: int = 500
    processes: int = 2
    temperature: float = 0.0
    top_p: float = 1.0
    port: int | None = None
    """A server that runs on this machine already. As to its memory, `pid` is its process."""
    pid: int | None = None
    repeat: int = 3

    @property
    def context(self) -> int:
        return self.prompt_tokens + _LONGER * self.tokens + _SPARE

    def quick(self) -> StreamsPlan:
        return replace(
            self, clients=(1, 2), tokens=8, prompt_tokens=8, ordinary=2, waiting=20, processes=2, repeat=1
        )


@dataclass(slots=True)
class _Target:
    """The server, and what its clients ask."""

    plan: StreamsPlan
    words: Words
    name: str
    """Its prompts are those of no earlier run."""
    port: int
    pid: int | None = None
    _asked: int = field(default=0, init=False)

    def work(self, clients: int, tokens: int) -> list[Mapping[str, Json]]:
        """What each process of clients has to do."""
        return _shares(self.plan, self.port, self.bodies(clients, tokens))

    def bodies(self, count: int, tokens: int) -> list[str]:
        """No two prompts are the same."""
        first, self._asked = self._asked, self._asked + count
        seeds = ((self.name, number) for number in range(first, self._asked))
        return [self._body(self.words.text(self.plan.prompt_tokens, seed), tokens) for seed in seeds]

    def _body(self, prompt: str, tokens: int) -> str:
        drawn = {"temperature": self.plan.temperature, "top_p": self.plan.top_p}
        told = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **drawn, **told})

    async def stats(self) -> dict[str, Json]:
        """Empty for servers that are not ours."""
        with suppress(EmberkeepError):
            return dict(await BenchClient(self.port).get(STATS))
        return {}

    async def settle(self) -> None:
        if await self.stats():
            await BenchClient(self.port).wait_until_settled()

    def memory(self) -> float:
        """MiB of RAM that it holds; 0 where that is not known."""
        with suppress(OSError):
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
            return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024
        return 0.0


async def run(workspace: Workspace, plan: StreamsPlan) -> BenchResult:
    async with _target(workspace, plan) as target:
        workspace.say("warm-up")
        told = await _crowd(target.work(max(plan.clients), plan.tokens))
        ready = await _frames(plan, size=round(_per_token(told, "bytes")))
        rows = [_row("frames that lie ready", [ready])]
        for clients in plan.clients:
            workspace.say(f"{clients} clients")
            rounds = [await _crowd(target.work(clients, plan.tokens)) for _ in range(plan.repeat)]
            rows.append(_row(f"{clients} clients", rounds))
        company = await _company(workspace, target)
    return BenchResult(
        "streams",
        (Table(f"{plan.tokens} tokens each", tuple(rows)), Table(f"{plan.ordinary} clients in company", company)),
        ("frames that lie ready: the most that these clients can read.",),
    )


@asynccontextmanager
async def _target(workspace: Workspace, plan: StreamsPlan) -> AsyncIterator[_Target]:
    if plan.port is not None:
        yield _Target(plan, Words(dict.fromkeys(COMMON, 1)), workspace.folder.name, plan.port, plan.pid)
        return
    workspace.require_context(plan.context)
    slots = max(*plan.clients, 2 * plan.ordinary)
    more = {"queue": plan.waiting + slots, "ram_budget": _BUDGET}
    with OwnServer(workspace, parallel=slots, ctx=plan.context, more=more) as server:
        yield _Target(plan, workspace.words, workspace.folder.name, server.port, server.process.pid)


# ── lean clients ──


@asynccontextmanager
async def _process(kind: str, work: Mapping[str, Json]) -> AsyncIterator[Process]:
    """In the end it is killed, whatever it does then."""
    command = with_default_signals([sys.executable, "-P", lean_client.__file__, kind])
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES)
    try:
        _tell(process, json.dumps(work))
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def _tell(process: Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n".encode())


async def _line(process: Process) -> Json:
    """Raises EmberkeepError when it has ended."""
    assert process.stdout is not None
    if line := await process.stdout.readline():
        return json.loads(line)
    raise EmberkeepError("A client of the benchmark has failed: see above.")


async def _crowd(
    work: Iterable[Mapping[str, Json]], company: Iterable[tuple[str, Mapping[str, Json]]] = ()
) -> list[dict[str, Any]]:
    """What came of every stream. Company comes after the first tokens, and goes in the end."""
    async with AsyncExitStack() as running:
        crowd = [await running.enter_async_context(_process("read", each)) for each in work]
        others = [await running.enter_async_context(_process(*each)) for each in company]
        for process in (*crowd, *others):
            await _line(process)
        for process in crowd:
            _tell(process, "go")
        for process in crowd:
            await _line(process)
        for process in others:
            _tell(process, "go")
        told = [each for process in crowd for each in await _line(process)]
    failed = [each["tail"] for each in told if not each["tokens"]]
    if failed:
        raise EmberkeepError(f"The server to be measured failed: {failed[0]}")
    return told


async def _frames(plan: StreamsPlan, size: int) -> list[dict[str, Any]]:
    """What the clients read of a server that has nothing to compute."""
    clients = max(plan.clients)
    frames = {"size": size, "frames": max(plan.tokens, _FRAMES // clients), "clients": clients, "host": _HERE}
    async with _process("serve", frames) as process:
        return await _crowd(_shares(plan, await _line(process), [""] * clients))


def _shares(plan: StreamsPlan, port: int, bodies: Sequence[str]) -> list[Mapping[str, Json]]:
    """What each process of clients has to do."""
    shares = (bodies[number :: plan.processes] for number in range(plan.processes))
    return [{"host": _HERE, "port": port, "bodies": list(share)} for share in shares if share]


def _tokens(told: Iterable[Mapping[str, Any]]) -> int:
    return sum(int(each["tokens"]) for each in told)


def _per_token(told: Sequence[Mapping[str, Any]], what: str) -> float:
    return float(sum(each[what] for each in told) / _tokens(told))


def _rate(told: Sequence[Mapping[str, Any]]) -> float:
    """Tokens per second, from the first request to the last byte."""
    seconds: float = max(each["ended"] for each in told) - min(each["sent"] for each in told)
    return _tokens(told) / seconds


def _row(label: str, rounds: Sequence[Sequence[Mapping[str, Any]]]) -> Row:
    waits = [[1e3 * (each["first"] - each["sent"]) for each in told] for told in rounds]
    return Row(
        label,
        {
            "tokens/s": series(map(_rate, rounds), ""),
            "first token, median": series((percentile(each, 50) for each in waits), "ms"),
            "the last one's": series(map(max, waits), "ms"),
            "reads per token": series((_per_token(told, "reads") for told in rounds), ""),
            "bytes per token": series((_per_token(told, "bytes") for told in rounds), ""),
        },
    )


# ── company ──


async def _company(workspace: Workspace, target: _Target) -> tuple[Row, ...]:
    plan = target.plan
    kinds = {
        "alone": ("read", 0),
        f"{plan.ordinary} more that read": ("read", plan.ordinary),
        f"{plan.ordinary} that do not read": ("hold", plan.ordinary),
        f"{plan.ordinary} that leave and come": ("leave", plan.ordinary),
        f"{plan.waiting} more that read": ("read", plan.waiting),
    }
    rounds: dict[str, list[dict[str, float]]] = {label: [] for label in kinds}
    for number in range(plan.repeat):
        for label, (kind, count) in kinds.items():
            workspace.say(f"round {number + 1} of {plan.repeat}: {label}")
            rounds[label].append(await _in_company(target, kind, count))
    alone = series((each["rate"] for each in rounds["alone"]), "")
    return tuple(_company_row(label, taken, alone) for label, taken in rounds.items())


async def _in_company(target: _Target, kind: str, count: int) -> dict[str, float]:
    plan = target.plan
    await target.settle()
    watch = _Watch(target)
    bodies = target.bodies(count, _LONGER * plan.tokens)
    work = {"host": _HERE, "port": target.port, "bodies": bodies, "reads": plan.tokens // 2}
    company = [(kind, work)] if count else []
    before = target.memory()
    watching = asyncio.create_task(watch.run())
    told = await _crowd(target.work(plan.ordinary, plan.tokens), company)
    watching.cancel()
    await target.settle()
    seen = {"before": before, "most": watch.memory, "after": target.memory(), "waiting": watch.waiting}
    return {"rate": _rate(told), **seen}


class _Watch:
    """The most that was seen of a server."""

    def __init__(self, target: _Target) -> None:
        self._target = target
        self.memory = target.memory()
        self.waiting = 0.0

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            stats = await self._target.stats()
            self.waiting = max(self.waiting, stats.get("scheduler", {}).get("waiting", 0))
            self.memory = max(self.memory, self._target.memory())
            await asyncio.sleep(_WATCH_S)


def _company_row(label: str, taken: Sequence[Mapping[str, float]], alone: Series) -> Row:
    rates = series((each["rate"] for each in taken), "")
    columns: dict[str, Value] = {"tokens/s": rates, "of alone": ratios(rates, alone)}
    columns["waiting"] = int(max(each["waiting"] for each in taken))
    if taken[0]["before"]:
        for when in ("before", "most", "after"):
            columns[f"memory, {when}"] = series((each[when] for each in taken), "MiB")
    return Row(label, columns)
