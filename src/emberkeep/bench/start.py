"""`start`: from the start of a server's process to the first token of "hello", ours and a llama-server's in turns.

Ours is started with what it remembers of earlier starts, and without: then its data folder is new, and its cache
folder empty but for llama.cpp itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from emberkeep.bench.report import BenchResult, Row, Table, ratios, series
from emberkeep.bench.servers import OURS, PEER, OwnServer, ServerUnderTest, chat_body
from emberkeep.bench.workspace import Workspace
from emberkeep.engine.llamacpp.prebuilt import cache_folder
from emberkeep.values import dataclass

_HELLO = chat_body([{"role": "user", "content": "hello"}], 1) | {"cache_prompt": False}
_REMEMBERED, _FIRST = f"{OURS}, remembered", f"{OURS}, first time"


@dataclass(frozen=True, slots=True)
class StartPlan:
    peer: Path | None = None
    repeat: int = 5

    def quick(self) -> StartPlan:
        return replace(self, repeat=1)


_Start = dict[str, float]
"""By row: seconds since the process was started, and what it took until the first token."""
_MEMORY = "resident memory"


async def run(workspace: Workspace, plan: StartPlan) -> BenchResult:
    starts: dict[str, list[_Start]] = {}
    known = workspace.new_data_dir()
    workspace.say("a start that is remembered")
    await _start(_REMEMBERED, workspace, plan, known)
    for number in range(plan.repeat):
        workspace.say(f"round {number + 1} of {plan.repeat}")
        for name in (_FIRST, _REMEMBERED, *([PEER] if plan.peer else [])):
            folder = known if name == _REMEMBERED else workspace.new_data_dir()
            starts.setdefault(name, []).append(await _start(name, workspace, plan, folder))
    rows = tuple(row(label, starts) for label in starts[_FIRST][0])
    notes = ("A ratio is ours over llama-server's: below 1 is quicker.",) if plan.peer else ()
    return BenchResult("start", (Table("start", rows),), notes)


def row(label: str, starts: Mapping[str, Sequence[_Start]]) -> Row:
    unit = "MiB" if label == _MEMORY else "s"
    values = {name: series((one[label] for one in each), unit) for name, each in starts.items()}
    if PEER in values:
        values |= {f"{name} / {PEER}": ratios(values[name], values[PEER]) for name in (_REMEMBERED, _FIRST)}
    return Row(label, values)


async def _start(name: str, workspace: Workspace, plan: StartPlan, folder: Path) -> _Start:
    with _server(name, workspace, plan, folder) as server:
        (await server.client.post("/v1/chat/completions", _HELLO)).body()
        seconds = {"until it is ready": server.ready_s, "until the first token": server.age()}
        return {**seconds, **_cost(server.process.pid)}


def _server(name: str, workspace: Workspace, plan: StartPlan, folder: Path) -> ServerUnderTest:
    """With default settings, both of them."""
    if name == PEER:
        return ServerUnderTest([str(plan.peer), "--model", str(workspace.model)], folder / "peer.log")
    env = {"XDG_CACHE_HOME": str(_cache_without_facts(folder))} if name == _FIRST else {}
    return OwnServer(workspace, folder, env=env)


def _cache_without_facts(folder: Path) -> Path:
    own = folder / "cache" / "emberkeep" / "llamacpp"
    own.mkdir(parents=True)
    for library in cache_folder().glob("*-*"):  # as `linux-x64-3.22.1`; facts are in folders of one word
        (own / library.name).symlink_to(library)
    return folder / "cache"


def _cost(pid: int) -> _Start:
    """Nothing where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return {}
    processor = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return {"processor time": processor, _MEMORY: pages * os.sysconf("SC_PAGE_SIZE") / 2**20}
