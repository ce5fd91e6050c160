"""`limit`: how close the first token after a restart comes to what the disk allows.

No implementation could beat this limit with the same files: the bytes of KV that were read, divided by the best
bandwidth of reading these files in the same round, plus one decode step at that length.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from emberkeep.bench.report import BenchResult, Row, Table, ratios, series
from emberkeep.bench.restart import ANSWER, LongPrompt, long_prompts
from emberkeep.bench.servers import OwnServer, chunk_files, drop_from_page_cache
from emberkeep.bench.workspace import Workspace

_MIB = 1 << 20
_BLOCK = 4 << 20
_READERS = 4


@dataclass(frozen=True, slots=True)
class LimitPlan:
    tokens: tuple[int, ...] = (1000, 2800, 4000, 7900)
    repeat: int = 5

    def quick(self) -> LimitPlan:
        return replace(self, tokens=(500,), repeat=1)


@dataclass(frozen=True, slots=True)
class _Resumed:
    ttft_ms: float
    step_ms: float
    store_bytes: int
    kernel_bytes: int
    """What the kernel fetched from the disk meanwhile; 0 where it does not say."""
    bandwidth: float

    @property
    def limit_ms(self) -> float:
        return 1e3 * self.store_bytes / self.bandwidth + self.step_ms


async def run(workspace: Workspace, plan: LimitPlan) -> BenchResult:
    rows, rounds = [], list[_Resumed]()
    for prompt in await long_prompts(workspace, plan.tokens):
        workspace.say(f"{prompt.tokens:,} tokens")
        data_dir = workspace.new_data_dir()
        await prompt.evaluate(data_dir)
        resumed = [await _resume(prompt, data_dir) for _ in range(plan.repeat)]
        rows.append(_row(prompt, resumed))
        rounds += resumed
    notes = ["limit: KV bytes read / the best bandwidth of reading the same files + one decode step."]
    if any(one.kernel_bytes < one.store_bytes / 2 for one in rounds):
        notes.append("Part of the store may have come from the page cache: choose a --data-dir that is on a disk.")
    return BenchResult("limit", (Table("the limit of a resume from disk", tuple(rows)),), tuple(notes))


async def _resume(prompt: LongPrompt, data_dir: Path) -> _Resumed:
    drop_from_page_cache(chunk_files(data_dir))
    with prompt.server(data_dir) as server:
        before = _bytes_from_disk(server)
        reply = await server.client.chat(prompt.main, ANSWER)
        kernel_bytes = _bytes_from_disk(server) - before
        stats = await server.client.wait_until_settled()
        hot = await server.client.chat(prompt.main, ANSWER)
    step_ms = hot.timings["predicted_ms"] / max(hot.completion_tokens - 1, 1)
    store_bytes = stats["store"]["cold"]["read_bytes"]
    return _Resumed(reply.ttft_ms, step_ms, store_bytes, kernel_bytes, read_bandwidth(chunk_files(data_dir)))


def _bytes_from_disk(server: OwnServer) -> int:
    try:
        lines = Path(f"/proc/{server.process.pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def _row(prompt: LongPrompt, resumed: Sequence[_Resumed]) -> Row:
    ttft, limit = series((one.ttft_ms for one in resumed), "ms"), series((one.limit_ms for one in resumed), "ms")
    return Row(
        f"{prompt.tokens:,} tokens",
        {
            "TTFT": ttft,
            "KV read": series((one.store_bytes / _MIB for one in resumed), "MiB"),
            "read by the kernel": series((one.kernel_bytes / _MIB for one in resumed), "MiB"),
            "disk": series((one.bandwidth / _MIB for one in resumed), "MiB/s"),
            "decode step": series((one.step_ms for one in resumed), "ms"),
            "limit": limit,
            "TTFT / limit": ratios(ttft, limit),
        },
    )


def read_bandwidth(files: Sequence[Path]) -> float:
    """Bytes per second at which these files come from an idle disk: the best of reading through the page cache and
    past it."""
    return max(_bandwidth(files, flags) for flags in {0, getattr(os, "O_DIRECT", 0)})


def _bandwidth(files: Sequence[Path], flags: int) -> float:
    """0 where the file system does not read that way."""
    own = threading.local()

    def read(path: Path) -> int:
        if not hasattr(own, "buffer"):
            own.buffer = mmap.mmap(-1, _BLOCK)  # page-aligned, as direct reads want it
        descriptor, total = os.open(path, os.O_RDONLY | flags), 0
        try:
            while (count := os.preadv(descriptor, [own.buffer], total)) == _BLOCK:
                total += count
            return total + count
        finally:
            os.close(descriptor)

    drop_from_page_cache(files)
    with suppress(OSError), ThreadPoolExecutor(_READERS) as readers:
        begin = perf_counter()
        return sum(readers.map(read, files)) / (perf_counter() - begin)
    return 0.0
