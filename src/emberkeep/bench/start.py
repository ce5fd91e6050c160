"""`start`: from the start of a server's process to the first token of "hello", ours and a llama-server's in turns.

Ours is started with what it remembers of earlier starts, and without: then its data folder is new, and its cache
folder empty but for llama.cpp itself.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

from emberkeep.bench.figures import Series, ratios, series
from emberkeep.bench.report import BenchResult, Row, Table
from emberkeep.bench.sides import OURS, PEER
from emberkeep.bench.stage import ModelPlace
from emberkeep.engine.llamacpp.shared_library import cache_folder
from emberkeep.errors import EmberkeepError
from emberkeep.signals import with_default_signals
from emberkeep.values import dataclass

_POLL_S = 0.005
_PATIENCE_S = 300.0
_HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "cache_prompt": False}
_REMEMBERED, _FIRST = f"{OURS}, remembered", f"{OURS}, first time"


@dataclass(frozen=True, slots=True)
class Workload:
    peer: Path | None = None
    repeat: int = 5

    def quick(self) -> Workload:
        return replace(self, repeat=1)


@dataclass(frozen=True, slots=True)
class Started:
    """In seconds since the process was started."""

    listens: float
    ready: float
    first_token: float
    processor: float
    """Of the process, until then."""
    resident: float
    """In bytes, then."""


async def run(place: ModelPlace, plan: Workload) -> BenchResult:
    found: dict[str, list[Started]] = {}
    known = place.new_data_dir()
    place.say("a start that is remembered")
    await asyncio.to_thread(_start, _REMEMBERED, place, plan, known)
    for number in range(plan.repeat):
        place.say(f"round {number + 1} of {plan.repeat}")
        for name in (_FIRST, _REMEMBERED, *([PEER] if plan.peer else [])):
            folder = known if name == _REMEMBERED else place.new_data_dir()
            started = await asyncio.to_thread(_start, name, place, plan, folder)
            found.setdefault(name, []).append(started)
    names = {"until it listens": "listens", "until it is ready": "ready", "until the first token": "first_token"}
    rows = [_row(label, field, found) for label, field in names.items()]
    rows.append(_row("processor time", "processor", found))
    size = Row("resident memory", {name: _series(each, "resident", "B") for name, each in found.items()})
    notes = ("× is ours over llama-server's: below 1 is quicker.",) if plan.peer else ()
    return BenchResult("start", (Table("start", (*rows, size)),), notes)


def _row(label: str, field: str, found: Mapping[str, Sequence[Started]]) -> Row:
    values = {name: _series(each, field, "s") for name, each in found.items()}
    peer = values.get(PEER)
    if peer is not None:
        values |= {f"{name} / {PEER}": ratios(values[name], peer) for name in (_REMEMBERED, _FIRST)}
    return Row(label, values)


def _series(started: Sequence[Started], field: str, unit: str) -> Series:
    return series((getattr(each, field) for each in started), unit)


def _start(name: str, place: ModelPlace, plan: Workload, folder: Path) -> Started:
    port = _free_port()
    env = dict(os.environ)
    if name == PEER:
        command = [str(plan.peer), "--model", str(place.model), "--port", str(port)]
    else:
        config = folder / "serve.json"
        config.write_text(json.dumps({"model": str(place.model), "data_dir": str(folder), "port": port}))
        command = [sys.executable, "-P", "-m", "emberkeep", "serve", "--config", str(config)]
    if name == _FIRST:
        env["XDG_CACHE_HOME"] = str(_cache_without_facts(folder))
    with (folder / "log").open("wb") as log:
        return _measure(command, env, port, log.fileno())


def _cache_without_facts(folder: Path) -> Path:
    own = folder / "cache" / "emberkeep" / "llamacpp"
    own.mkdir(parents=True)
    for library in cache_folder().glob("*-*"):  # as `linux-x64-3.22.1`; facts are in folders of one word
        (own / library.name).symlink_to(library)
    return folder / "cache"


def _measure(command: Sequence[str], env: Mapping[str, str], port: int, log: int) -> Started:
    begin = monotonic()
    process = subprocess.Popen(with_default_signals(command), env=dict(env), stdout=log, stderr=log)
    try:
        states = _states(process, port)
        next(states)
        listens = monotonic() - begin
        while next(states) != http.client.OK:
            pass
        ready = monotonic() - begin
        _ask(port, "POST", "/v1/chat/completions", json.dumps(_HELLO))
        first_token = monotonic() - begin
        return Started(listens, ready, first_token, *_cost(process.pid))
    finally:
        process.kill()
        process.wait()


def _states(process: subprocess.Popen[bytes], port: int) -> Iterator[int]:
    """The status of `/health`, again and again once there is one. Raises EmberkeepError when there never is."""
    begin = monotonic()
    while monotonic() - begin < _PATIENCE_S:
        if process.poll() is not None:
            raise EmberkeepError("The server to be measured did not start.")
        try:
            status = _ask(port, "GET", "/health")
        except OSError:
            sleep(_POLL_S)
        else:
            yield status
            sleep(_POLL_S)
    raise EmberkeepError(f"The server to be measured was not ready within {_PATIENCE_S:.0f} s.")


def _ask(port: int, method: str, path: str, body: str | None = None) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)) as connection:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status


def _cost(pid: int) -> tuple[float, float]:
    """Processor seconds and resident bytes, 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0, 0.0
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), float(pages * os.sysconf("SC_PAGE_SIZE"))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
