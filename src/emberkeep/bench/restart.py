"""`restart`: what a long prompt costs in a fresh process, and what it costs again after a crash.

Cold means: a fresh process and an empty store. Warm means: another fresh process on the store that the first
one left when it was killed, with the store's files dropped from the page cache. Loading the model is in
neither; tokenising, looking up, reading and importing are in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from pathlib import Path
from statistics import median

from emberkeep.bench.disk import chunk_files, drop_from_page_cache, read_bandwidth
from emberkeep.bench.figures import Series, ratios, series, speedup
from emberkeep.bench.http_client import Client, Messages, Reply
from emberkeep.bench.report import BenchResult, Row, Table
from emberkeep.bench.server_process import ServerProcess
from emberkeep.bench.stage import Stage
from emberkeep.values import dataclass

MIB = 1 << 20
_ANSWER = 16
_SPARE = 64
_OTHER = 640
"""Tokens of the conversation in between. The context is so tight that only one of the two fits the engine."""


@dataclass(frozen=True, slots=True)
class Workload:
    sizes: tuple[int, ...] = (1000, 2800, 4000, 7900)
    repeat: int = 5
    cold_budget_s: float = 60.0
    """Cold runs are repeated as long as they take no more than this in all, per size."""

    @property
    def context(self) -> int:
        return _context(max(self.sizes))

    def quick(self) -> Workload:
        return replace(self, sizes=(500,), repeat=1)


def _context(tokens: int) -> int:
    return max(tokens, _OTHER) + _SPARE + 2 * _ANSWER


@dataclass(frozen=True, slots=True)
class _Case:
    stage: Stage
    tokens: int
    around: int

    @property
    def main(self) -> Messages:
        return _messages(self.stage.words.text(self.tokens - self.around, "main"))

    @property
    def other(self) -> Messages:
        return _messages(self.stage.words.text(_OTHER - self.around, "other"))

    def server(self, data_dir: Path) -> ServerProcess:
        return ServerProcess(self.stage.model, data_dir, parallel=1, ctx=_context(self.tokens))


@dataclass(frozen=True, slots=True)
class _Warm:
    """One life of a server on a store that another one left behind."""

    cold: Reply
    """What the other one answered."""
    disk: Reply
    ram: Reply
    hot: Reply
    store_bytes: int
    kernel_bytes: int | None
    bandwidth: float

    @property
    def limit_ms(self) -> float:
        return 1e3 * self.store_bytes / self.bandwidth + self.hot.decode_step_ms


@dataclass(frozen=True, slots=True)
class _Size:
    cold: list[Reply] = field(default_factory=list)
    warm: list[_Warm] = field(default_factory=list)


async def run(stage: Stage, plan: Workload) -> BenchResult:
    around = await _tokens_around(stage)
    sizes = [await _measure(_Case(stage, tokens, around), plan) for tokens in plan.sizes]
    return BenchResult(
        "restart",
        (
            Table("time to first token", tuple(row for size in sizes for row in _ttft_rows(size))),
            Table("the limit of a resume from disk", tuple(_limit_row(size) for size in sizes)),
        ),
        (
            "limit: KV bytes read / the best bandwidth of reading the same files + one decode step.",
            *_doubts(sizes),
        ),
    )


async def _measure(case: _Case, plan: Workload) -> _Size:
    """Cold and warm in turns; warm goes on against the newest store when cold has used up its time."""
    size, data_dir, spent = _Size(), Path(), 0.0
    for number in range(plan.repeat):
        round_ = f"round {number + 1} of {plan.repeat}"
        if number == 0 or spent + size.cold[-1].ttft_ms / 1e3 <= plan.cold_budget_s:
            case.stage.say(f"{case.tokens:,} tokens: cold, {round_}")
            data_dir = case.stage.new_data_dir()
            size.cold.append(await _cold(case, data_dir))
            spent += size.cold[-1].ttft_ms / 1e3
        case.stage.say(f"{case.tokens:,} tokens: warm, {round_}")
        size.warm.append(await _warm(case, data_dir, size.cold[-1]))
    return size


async def _cold(case: _Case, data_dir: Path) -> Reply:
    with case.server(data_dir) as server:
        client = Client(server.port)
        reply = await client.chat(case.main, _ANSWER)
        await client.wait_until_settled()
        return reply


async def _warm(case: _Case, data_dir: Path, cold: Reply) -> _Warm:
    drop_from_page_cache(chunk_files(data_dir))
    with case.server(data_dir) as server:
        client = Client(server.port)
        kernel_before = server.bytes_from_disk()
        disk = await client.chat(case.main, _ANSWER)
        kernel_after = server.bytes_from_disk()
        stats = await client.wait_until_settled()
        hot = await client.chat(case.main, _ANSWER)
        await client.chat(case.other, _ANSWER)
        await client.wait_until_settled()
        ram = await client.chat(case.main, _ANSWER)
    return _Warm(
        cold=cold,
        disk=disk,
        ram=ram,
        hot=hot,
        store_bytes=stats["store"]["cold"]["read_bytes"],
        kernel_bytes=None if kernel_before is None or kernel_after is None else kernel_after - kernel_before,
        bandwidth=read_bandwidth(chunk_files(data_dir)),
    )


async def _tokens_around(stage: Stage) -> int:
    """What the chat template, the system message and the question add to the words."""
    with ServerProcess(stage.model, stage.new_data_dir(), parallel=1) as server:
        return len(await Client(server.port).prompt_tokens(_messages("")))


def _messages(text: str) -> Messages:
    return (
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": f"{text}\n\nTell me a long story about these words."},
    )


def _ttft_rows(size: _Size) -> Iterable[Row]:
    cold, references = _ttft(size.cold), [warm.cold for warm in size.warm]
    yield Row(_label(size, "cold"), {"TTFT": cold, "reused tokens": size.cold[-1].cached_tokens})
    for name in ("disk", "ram", "hot"):
        replies: list[Reply] = [getattr(warm, name) for warm in size.warm]
        ttft = _ttft(replies)
        yield Row(
            _label(size, "RAM" if name == "ram" else name),
            {
                "TTFT": ttft,
                "faster than cold": speedup(cold, ttft),
                "reused tokens": int(median(reply.cached_tokens for reply in replies)),
                "mostly from": " ".join(sorted({reply.tier for reply in replies})),
                "same answer": f"{sum(map(_same, replies, references))} of {len(replies)}",
            },
        )


def _limit_row(size: _Size) -> Row:
    limit = series((warm.limit_ms for warm in size.warm), "ms")
    kernel = [warm.kernel_bytes / MIB for warm in size.warm if warm.kernel_bytes is not None]
    return Row(
        _label(size, "disk"),
        {
            "KV read": series((warm.store_bytes / MIB for warm in size.warm), "MiB"),
            "read by the kernel": series(kernel, "MiB") if kernel else "unknown",
            "disk": series((warm.bandwidth / MIB for warm in size.warm), "MiB/s"),
            "decode step": series((warm.hot.decode_step_ms for warm in size.warm), "ms"),
            "preparing": series((warm.disk.prepare_ms for warm in size.warm), "ms"),
            "loading": series((warm.disk.load_ms for warm in size.warm), "ms"),
            "limit": limit,
            "TTFT / limit": ratios(_ttft([warm.disk for warm in size.warm]), limit),
        },
    )


def _doubts(sizes: Sequence[_Size]) -> Iterable[str]:
    warm = [warm for size in sizes for warm in size.warm]
    if any(w.disk.cached_tokens < w.hot.cached_tokens for w in warm):
        yield "Some restarts did not find all that had been stored: what is called disk was partly evaluated."
    if any(w.kernel_bytes is not None and w.kernel_bytes < w.store_bytes / 2 for w in warm):
        yield "Part of the store came from the page cache: choose a --data-dir that is on a disk."
    if any(w.ram.tier != "warm" for w in warm):
        yield "The RAM rows were not served from RAM: the RAM budget is too small for this model."
    if not all(_same(w.disk, w.cold) for w in warm):
        yield "Some answers after a restart are not the cold ones: compare them with `Emberkeep.verify`."
    if not all(_same(reply, w.cold) for w in warm for reply in (w.ram, w.hot)):
        yield (
            "RAM and hot answers may differ from the cold one: llama.cpp rounds differently when the same state "
            "lies elsewhere in its memory, which decides between tokens that are about equally likely."
        )


def _ttft(replies: Iterable[Reply]) -> Series:
    return series((reply.ttft_ms for reply in replies), "ms")


def _same(one: Reply, other: Reply) -> bool:
    return (one.text, one.completion_tokens) == (other.text, other.completion_tokens)


def _label(size: _Size, state: str) -> str:
    return f"{size.cold[0].prompt_tokens:,} tokens, {state}"
