"""store: a hundred thousand chunks, as a year of agents leaves them: opening the store, and finding a prompt."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from emberkeep.bench.report import BenchResult, Row, Series, Table, series
from emberkeep.bench.workspace import Workspace
from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.disk.chunkfile import Description
from emberkeep.kv.policy import CHUNK_TOKENS
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.kv.tree import ROOT, Made, chunk_key
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import EXACT

_FINGERPRINT = hashlib.sha256(b"bench store").digest()
_PAYLOAD = memoryview(bytes(256))
"""Opening and looking up read no payload, so its size does not matter here."""
_VOCABULARY = 50_000
_BATCH = 256
_PLENTY = 1 << 50


@dataclass(frozen=True, slots=True)
class StorePlan:
    chunks: int = 100_000
    per_conversation: int = 40
    tokens: int = 4_000
    """The length of the prompts that are looked up."""
    lookups: int = 50
    repeat: int = 5

    def quick(self) -> StorePlan:
        return StorePlan(chunks=2_000, lookups=10, repeat=2)


async def run(workspace: Workspace, plan: StorePlan) -> BenchResult:
    root = workspace.new_data_dir()
    workspace.say(f"writing {plan.chunks:,} chunks")
    prompts = _fill(root, plan)
    workspace.say("opening")
    opened = series([_seconds_to_open(root) for _ in range(plan.repeat)], "s")
    store = _open(root)
    try:
        rows = tuple(_lookups(store, prompts[: plan.lookups], plan))
    finally:
        store.close()
    return BenchResult(
        "store",
        (Table(f"A store with {plan.chunks:,} chunks", (Row("open", {"time": opened}), *rows)),),
        ("The index is in the page cache: a machine that has just booted reads it from disk once.",),
    )


def _lookups(store: KvStore, prompts: list[TokenArray], plan: StorePlan) -> Iterator[Row]:
    random = np.random.default_rng(1)
    edited = [_edit(prompt, random) for prompt in prompts]
    unknown = [random.integers(0, _VOCABULARY, plan.tokens, dtype=np.int32) for _ in prompts]
    for label, asked in (("all of it stored", prompts), ("edited in the middle", edited), ("unknown", unknown)):
        found = [_match(store, prompt) for prompt in asked]
        times = series([seconds * 1e3 for seconds, _ in found], "ms")
        tokens = sum(count for _, count in found) // len(found)
        yield Row(f"look up {plan.tokens:,} tokens, {label}", {"time": times, "tokens found": tokens})
    yield Row("list everything", {"time": _time(lambda: store.catalogue.entries(), plan.repeat)})


def _match(store: KvStore, prompt: TokenArray) -> tuple[float, int]:
    begin = perf_counter()
    match = store.match(EXACT, prompt)
    seconds = perf_counter() - begin
    store.release(match)
    return seconds, match.tokens


def _time(action: Callable[[], object], repeat: int) -> Series:
    samples = []
    for _ in range(repeat):
        begin = perf_counter()
        action()
        samples.append(1e3 * (perf_counter() - begin))
    return series(samples, "ms")


def _seconds_to_open(root: Path) -> float:
    gc.collect()  # the one before is garbage, which no program that opens a store has
    begin = perf_counter()
    store = _open(root)
    seconds = perf_counter() - begin
    store.close()
    return seconds


def _open(root: Path) -> KvStore:
    return KvStore(_FINGERPRINT, Budgets(_PLENTY, _PLENTY), ChunkFiles(root, _FINGERPRINT))


def _fill(root: Path, plan: StorePlan) -> list[TokenArray]:
    """Write the chunks; returns the beginnings of some conversations as prompts."""
    random = np.random.default_rng(0)
    prompts: list[TokenArray] = []
    files = ChunkFiles(root, _FINGERPRINT)
    files.open_rows()
    batch: list[tuple[Description, memoryview]] = []
    for start in range(0, plan.chunks, plan.per_conversation):
        count = min(plan.per_conversation, plan.chunks - start)
        tokens = random.integers(0, _VOCABULARY, count * CHUNK_TOKENS, dtype=np.int32)
        batch += ((description, _PAYLOAD) for description in _describe(tokens))
        if len(tokens) >= plan.tokens:
            prompts.append(tokens[: plan.tokens])
        if len(batch) >= _BATCH:
            files.write(batch)
            batch = []
    files.write(batch)
    files.close()
    return prompts


def _describe(tokens: TokenArray) -> Iterator[Description]:
    """The chunks of one conversation."""
    parent, take = ROOT, 0
    for start in range(0, len(tokens), CHUNK_TOKENS):
        part = tokens[start : start + CHUNK_TOKENS]
        key = chunk_key(_FINGERPRINT, EXACT, parent, take, part)
        yield Description(_FINGERPRINT, "", key, parent, take, start, part, (), Made.WIDE)
        parent, take = key, CHUNK_TOKENS


def _edit(prompt: TokenArray, random: np.random.Generator) -> TokenArray:
    copy = prompt.copy()
    copy[len(copy) // 2 :] = random.integers(0, _VOCABULARY, len(copy) - len(copy) // 2, dtype=np.int32)
    return copy
