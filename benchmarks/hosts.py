"""`hosts`: what a long prompt costs on a host that has never seen it, when another host has, and they share a
server (`--server URL`).

Evaluated: by the first host. Remote: a second one, with an empty data folder of its own. Disk: the second one
again, killed and started without the server, its files dropped from the page cache. Loading the model is in none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path

from emberkeep.bench.report import BenchResult, Row, Series, Table, series
from emberkeep.bench.servers import (
    STATS,
    BenchClient,
    Messages,
    OwnServer,
    Reply,
    chunk_files,
    drop_from_page_cache,
)
from emberkeep.bench.workspace import Workspace
from emberkeep.types.request import Json
from emberkeep.values import dataclass

MIB = 1 << 20
_ANSWER = 16
_SPARE = 256
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class HostsPlan:
    server: str
    """A Valkey or Redis server: valkey://HOST:PORT."""
    tokens: tuple[int, ...] = (1000, 4000)
    repeat: int = 5

    @property
    def context(self) -> int:
        return max(self.tokens) + _SPARE

    def quick(self) -> HostsPlan:
        return replace(self, tokens=(500,), repeat=1)


@dataclass(slots=True)
class _Size:
    tokens: int
    evaluated: list[Reply] = field(default_factory=list)
    remote: list[Reply] = field(default_factory=list)
    disk: list[Reply] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    """MiB from the server, in each round."""
    seconds: list[float] = field(default_factory=list)
    """That reading them took."""
    written: list[float] = field(default_factory=list)


async def run(workspace: Workspace, plan: HostsPlan) -> BenchResult:
    workspace.require_context(plan.context)
    sizes = [await _measure(workspace, plan, tokens) for tokens in plan.tokens]
    return BenchResult(
        "hosts",
        (
            Table("time to first token", tuple(row for size in sizes for row in _rows(size))),
            Table("the line", tuple(_line_row(size) for size in sizes)),
        ),
        (
            "evaluated: the host that sees a prompt first. remote: another one, with another question after it.",
            *_doubts(sizes),
        ),
    )


async def _measure(workspace: Workspace, plan: HostsPlan, tokens: int) -> _Size:
    size = _Size(tokens)
    for number in range(plan.repeat):
        workspace.say(f"{tokens:,} tokens: round {number + 1} of {plan.repeat}")
        # What no earlier run has left there.
        text = workspace.words.text(tokens, f"{workspace.folder.name} {tokens} {number}")
        first, second = workspace.new_data_dir(), workspace.new_data_dir()
        with _host(workspace, plan, first, shares=True) as server:
            size.evaluated.append(await server.client.chat(_messages(text, "first"), _ANSWER))
            size.written.append((await _when_shared(server.client))["written_bytes"] / MIB)
        with _host(workspace, plan, second, shares=True) as server:
            size.remote.append(await server.client.chat(_messages(text, "second"), _ANSWER))
            told = await _when_shared(server.client)
            size.came.append(told["read_bytes"] / MIB)
            size.seconds.append(told["read_seconds"])
            await server.client.wait_until_settled()
        drop_from_page_cache(chunk_files(second))
        with _host(workspace, plan, second, shares=False) as server:
            size.disk.append(await server.client.chat(_messages(text, "third"), _ANSWER))
    return size


def _host(workspace: Workspace, plan: HostsPlan, data_dir: Path, *, shares: bool) -> OwnServer:
    more: Mapping[str, Json] = {"remote": plan.server} if shares else {}
    return OwnServer(workspace, data_dir, parallel=1, ctx=plan.context, more=more)


async def _when_shared(client: BenchClient) -> dict[str, Json]:
    """What the server tells of the remote tier, when everything that it has is there."""
    while True:
        stats = await client.get(STATS)
        remote: dict[str, Json] = stats["store"]["remote"]
        if not stats["scheduler"]["active"] and not remote["pending_chunks"]:
            return remote
        await asyncio.sleep(_POLL_S)


def _messages(text: str, question: str) -> Messages:
    return (
        {"role": "system", "content": text},
        {"role": "user", "content": f"Tell me a story about the {question} of these words."},
    )


def _rows(size: _Size) -> Iterable[Row]:
    evaluated = _ttft(size.evaluated)
    for name in ("evaluated", "remote", "disk"):
        replies: list[Reply] = getattr(size, name)
        ttft = _ttft(replies)
        yield Row(
            f"{size.tokens:,} tokens, {name}",
            {
                "TTFT": ttft,
                "faster than evaluated": series((evaluated.median / one for one in ttft.samples), "×"),
                "evaluated tokens": series((one.prompt_tokens - one.cached_tokens for one in replies), ""),
                "mostly from": " ".join(sorted({one.tier for one in replies})),
            },
        )


def _line_row(size: _Size) -> Row:
    rates = [came / seconds for came, seconds in zip(size.came, size.seconds, strict=True) if seconds]
    return Row(
        f"{size.tokens:,} tokens",
        {
            "written": series(size.written, "MiB"),
            "read": series(size.came, "MiB"),
            "speed": series(rates, "MiB/s") if rates else "nothing came",
            "loading": series((one.detail["load_ms"] for one in size.remote), "ms"),
        },
    )


def _doubts(sizes: Iterable[_Size]) -> Iterable[str]:
    if any(reply.tier != "remote" for size in sizes for reply in size.remote):
        yield "Not all of it came from the server: see its log, and `emberkeep doctor`."


def _ttft(replies: Iterable[Reply]) -> Series:
    return series((reply.ttft_ms for reply in replies), "ms")
