"""`bits`: what storing state in 8 or 4 bits saves, what it costs, and how much of an answer survives it.

Every prompt is evaluated, stored and dropped from the engine, once per number of bits; then it is loaded from the
store and continued. What is compared with is the continuation of the state as it was computed. The prompts are the
model's own texts: where every word would do, as after random ones, the choice of the next tells nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from time import perf_counter

import numpy as np
import numpy.typing as npt

from benchmarks.listener import Listener
from emberkeep.bench.report import BenchResult, Row, Series, Table, Value, series
from emberkeep.bench.workspace import Workspace
from emberkeep.chat.prompt import prompt_of_ids
from emberkeep.config.settings import PREFILL_SLICE, Config
from emberkeep.engine.base import Exported, Outcome, Payload
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.threads import one_core_each
from emberkeep.kv.policy import CHUNK_TOKENS
from emberkeep.runtime.parts import open_store
from emberkeep.sched.engine_thread import EngineThread
from emberkeep.sched.lifetimes import SchedulerSettings
from emberkeep.sched.sampling import Sampler
from emberkeep.sched.scheduler import Scheduler
from emberkeep.sched.sequence import Sequence as Sequence_
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import TokenLogprob
from emberkeep.types.lineage import EXACT, EXACT_BITS, Lineage, private_namespace
from emberkeep.types.request import Execution, Request, Sampling

Logits = npt.NDArray[np.float32]

_BITS = (16, 8, 4)
_OPENING = 24
"""Random words that a text of the model begins with, so that no two are alike."""


@dataclass(frozen=True, slots=True)
class BitsPlan:
    prompts: int = 50
    chunks: int = 4
    """How many one prompt has."""
    answer: int = 32

    @property
    def tokens(self) -> int:
        """The last token of a prompt is evaluated, not loaded: all that is loaded are full chunks."""
        return self.chunks * CHUNK_TOKENS + 1

    @property
    def context(self) -> int:
        return self.tokens + self.answer + 1

    def quick(self) -> BitsPlan:
        return replace(self, prompts=3, chunks=2, answer=8)


@dataclass(slots=True)
class _Meter:
    """What went out of an engine and into it."""

    exported: int = 0
    """TokenArray."""
    bytes: int = 0
    export_s: float = 0.0
    imported: int = 0
    """TokenArray."""
    import_s: float = 0.0

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.exported


class _Metered(LlamaEngine):
    meter = _Meter()

    def export_kv(self, sequence: int, borders: Sequence[int], bits: int = EXACT_BITS) -> Exported:
        begin = perf_counter()
        payloads = super().export_kv(sequence, borders, bits).payloads()
        self.meter.export_s += perf_counter() - begin
        self.meter.exported += borders[-1] - borders[0]
        self.meter.bytes += sum(len(payload) for payload in payloads)
        return Exported(payloads)

    def import_kv(
        self, sequence: int, start: int, end: int, payloads: Sequence[Payload], payload_start: int
    ) -> Outcome:
        begin = perf_counter()
        outcome = super().import_kv(sequence, start, end, payloads, payload_start)
        self.meter.import_s += perf_counter() - begin
        self.meter.imported += end - start
        return outcome


class _Script(Sampler):
    """Follows `script` where there is one, is greedy otherwise, and remembers what it saw. No text ends here."""

    def __init__(self, ends: frozenset[int], script: Sequence[int] = ()) -> None:
        super().__init__(Sampling(temperature=0, logit_bias=dict.fromkeys(ends, -100.0)))
        self._script = iter(script)
        self.seen: list[Logits] = []
        self.greedy: list[int] = []

    def sample(self, logits: Logits, pieces: Sequence[bytes]) -> tuple[int, TokenLogprob | None]:
        token, logprob = super().sample(logits, pieces)
        self.seen.append(logits.copy())
        self.greedy.append(token)
        return next(self._script, token), logprob


@dataclass(slots=True)
class _Findings:
    """What was found with one number of bits."""

    meter: _Meter = field(default_factory=_Meter)
    same_choice: list[float] = field(default_factory=list)
    """Per prompt the percentage of positions, on the way of the exact answer, where the choice is the same."""
    same_text: list[float] = field(default_factory=list)
    """Per prompt the percentage of a free answer that comes before its first difference."""
    divergence: list[float] = field(default_factory=list)
    """Per position the KL divergence from the exact distribution."""

    def row(self, bits: int, exact: _Meter) -> Row:
        meter, chosen = self.meter, self.same_choice
        values: dict[str, Value] = {
            "bytes per token": _one(meter.bytes_per_token, "B"),
            "of 16 bits": _one(100 * meter.bytes_per_token / exact.bytes_per_token, "%"),
            "out, per 1,000 tokens": _one(1e6 * meter.export_s / meter.exported, "ms"),
            "in, per 1,000 tokens": _one(1e6 * meter.import_s / meter.imported, "ms"),
            "same next token": _one(sum(chosen) / len(chosen), "%"),
            "same text": _one(sum(self.same_text) / len(self.same_text), "%"),
            "mean KL": _one(1e3 * sum(self.divergence) / len(self.divergence), "mnat"),
        }
        return Row(f"{bits} bits", values)


class _Bench:
    """A loop over a store and a real engine."""

    def __init__(self, engine: _Metered, config: Config, thread: EngineThread, plan: BitsPlan) -> None:
        self._engine = engine
        self._plan = plan
        self._ends = engine.vocab.eog | engine.vocab.controls
        self._store = open_store(config, engine.fingerprint, {"model": "benchmark"})
        self._loop = Scheduler(engine, self._store, SchedulerSettings(1, PREFILL_SLICE), thread=thread)

    async def own_text(self, opening: Sequence[int], seed: int) -> TokenArray:
        """What the model writes after `opening`."""
        ends = dict.fromkeys(self._ends, -100.0)
        sampler = Sampler(Sampling(seed=seed, logit_bias=ends))
        tokens = await self._run(opening, sampler, self._plan.tokens - len(opening), EXACT, is_kept=False)
        return np.array([*opening, *tokens], np.int32)

    async def compare(self, prompt: TokenArray, salt: str, findings: dict[int, _Findings]) -> None:
        """Prompts with different salts share nothing, so that the chunks of each begin at its first token."""
        exact = _Script(self._ends)
        answer: list[int] = []
        for bits, found in findings.items():
            lineage = Lineage(private_namespace(f"in {bits}", salt), bits)
            self._engine.meter = found.meter
            if bits == EXACT_BITS:
                answer = await self._answer(prompt, exact, lineage)
            else:
                await self._run(prompt, Sampler(Sampling()), 0, lineage)
            forced, free = _Script(self._ends, answer), _Script(self._ends)
            await self._answer(prompt, forced, lineage, from_store=True, is_kept=False)
            tokens = await self._answer(prompt, free, lineage, from_store=True, is_kept=False)
            found.same_choice.append(percentage(sum(map(int.__eq__, forced.greedy, exact.greedy)), len(answer)))
            found.same_text.append(percentage(before_difference(tokens, answer), len(answer)))
            found.divergence += [kl(a, b) for a, b in zip(exact.seen, forced.seen, strict=True)]

    async def _answer(
        self,
        prompt: TokenArray,
        sampler: Sampler,
        lineage: Lineage,
        *,
        from_store: bool = False,
        is_kept: bool = True,
    ) -> list[int]:
        length = self._plan.answer
        return await self._run(prompt, sampler, length, lineage, from_store=from_store, is_kept=is_kept)

    async def _run(
        self,
        prompt: Sequence[int] | TokenArray,
        sampler: Sampler,
        length: int,
        lineage: Lineage,
        *,
        from_store: bool = False,
        is_kept: bool = True,
    ) -> list[int]:
        listener = Listener()
        made = prompt_of_ids(np.asarray(prompt, np.int32), lineage, max_new=length)
        request = Request(execution=Execution(from_store=from_store, is_kept=is_kept))
        self._loop.submit(Sequence_(made, request, sampler, listener))
        await asyncio.wrap_future(listener.ending)
        return listener.tokens

    def close(self) -> None:
        self._loop.close()
        self._store.close()


async def run(workspace: Workspace, plan: BitsPlan) -> BenchResult:
    workspace.require_context(plan.context)
    config = Config(model=str(workspace.model), data_dir=workspace.new_data_dir(), parallel=1)
    settings = LlamaSettings(context=plan.context, cells=2 * plan.context, sequences=2, batch=PREFILL_SLICE)
    thread = EngineThread()
    engine = thread.submit(lambda: _open(workspace, settings)).result()
    findings = {bits: _Findings() for bits in _BITS if bits in engine.capabilities.packs}
    bench = _Bench(engine, config, thread, plan)
    try:
        for number in range(plan.prompts):
            workspace.say(f"prompt {number + 1} of {plan.prompts}")
            opening = engine.vocab.tokenize(workspace.words.text(_OPENING, number))
            await bench.compare(await bench.own_text(opening, number), str(number), findings)
    finally:
        await asyncio.to_thread(bench.close)
    return _result(plan, findings)


def _open(workspace: Workspace, settings: LlamaSettings) -> _Metered:
    with one_core_each():
        return _Metered(LlamaModel(workspace.model), settings, weights_digest="benchmark")


def before_difference(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many are equal before the first that is not."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False)))


def kl(exact: Logits, other: Logits) -> float:
    """The divergence of the distribution of `other` from that of `exact`, in nats."""
    p, q = _log_softmax(exact), _log_softmax(other)
    return float((np.exp(p) * (p - q)).sum())


def percentage(part: int, whole: int) -> float:
    return 100 * part / whole


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def _one(value: float, unit: str) -> Series:
    return series([value], unit)


def _result(plan: BitsPlan, findings: dict[int, _Findings]) -> BenchResult:
    exact = findings[EXACT_BITS].meter
    title = f"{plan.prompts} texts of {plan.tokens:,} tokens, stored, loaded and continued by {plan.answer}"
    return BenchResult(
        "bits",
        (Table(title, tuple(found.row(bits, exact) for bits, found in findings.items())),),
        (
            "Same next token: the share of positions, along the exact answer, where the choice is the same.",
            "Same text: the share of a free answer before its first difference, after which it is another text.",
            "The newest tokens of a conversation, up to 127, stay in 16 bits and are not in these figures.",
        ),
    )
