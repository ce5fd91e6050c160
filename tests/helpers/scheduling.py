"""A loop over a real store and any engine, and a consumer that remembers what it was told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from emberkeep.chat.messages import CacheKeys
from emberkeep.chat.prompt import Prompt, Stable
from emberkeep.chat.prompt_tokens import SeamedText, TokenizedText
from emberkeep.engine.base import Engine, Exported, KvExport, Outcome, Payload, Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import EmberkeepError, EngineError
from emberkeep.kv.corpus import TokenCorpus
from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.policy import CHUNK_TOKENS, Keeping, Rate
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.sched.draft_model import LoadedDraft
from emberkeep.sched.lifetimes import SchedulerSettings
from emberkeep.sched.sampling import Sampler
from emberkeep.sched.scheduler import Scheduler
from emberkeep.sched.sequence import Sequence as Sequence_
from emberkeep.sched.sequence_state import Ending
from emberkeep.token_arrays import TokenArray
from emberkeep.types.cache import Label
from emberkeep.types.events import LookupRecord, Progress, TokenLogprob
from emberkeep.types.lineage import EXACT, Approximation, Lineage
from emberkeep.types.request import Execution, Request, Sampling
from helpers.kv_building import chunks_of, lineage_of

GREEDY = Sampling(temperature=0)
ENDLESS = Sampling(temperature=0, logit_bias=dict.fromkeys(FakeEngine().vocab.eog, -1e9))
"""Never ends its turn."""
SEEDED = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11)
CLOSING = (FakeEngine().vocab.specials["<|im_end|>"], 10)
PATIENCE = 60.0
SLICE = 128  # the smallest there is: the measured speed of a paused engine must not change it


class Recorder:
    """`stop_at(tokens)`: how many sampled tokens to keep, or None to go on. `then` is called when it has ended,
    on the engine's thread: what it submits is there before the loop's next step."""

    def __init__(
        self,
        stop_at: Callable[[list[int]], int | None] = lambda _: None,
        then: Callable[[Recorder], None] = lambda _: None,
    ) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob | None] = []
        self.scores: list[TokenLogprob] = []
        self.reports: list[Progress] = []
        self.ending: Ending | None = None
        self.error: EmberkeepError | None = None
        self._stop_at = stop_at
        self._then = then
        self._kept = 0
        self._over = threading.Event()

    def progress(self, progress: Progress) -> None:
        self.reports.append(progress)

    def scored(self, start: int, logprobs: Iterable[TokenLogprob]) -> None:
        """Of the second token and those that follow it."""
        self.scores[start - 1 :] = logprobs

    def token(self, token: int, logprob: TokenLogprob | None) -> bool:
        assert not self._over.is_set()
        self.tokens.append(token)
        self.logprobs.append(logprob)
        kept = self._stop_at(self.tokens)
        self._kept = kept or 0
        return kept is not None

    def kept_tokens(self) -> int:
        return self._kept

    def full(self) -> bool:
        return False

    def ended(self, ending: Ending) -> None:
        assert not self._over.is_set()
        self.ending = ending
        self._then(self)
        self._over.set()

    def failed(self, error: EmberkeepError) -> None:
        assert not self._over.is_set()
        self.error = error
        self._over.set()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> Recorder:
        assert self._over.wait(PATIENCE), "the sequence neither ended nor failed"
        return self

    @property
    def answer(self) -> list[int]:
        """The tokens of a sequence that must have ended well."""
        self.wait()
        assert self.error is None, self.error
        return self.tokens

    @property
    def lookup(self) -> LookupRecord:
        self.wait()
        assert self.ending is not None
        return self.ending.lookup


class Rig:
    """A loop for tests. Loading is always taken to be worth it: the fake engine is too quick to measure."""

    def __init__(
        self,
        folder: Path | None = None,
        engine: Engine | None = None,
        *,
        parallel: int = 4,
        prefill_slice: int = 256,
        warm: int = 1 << 30,
        cold: int = 1 << 30,
        memory: int | None = None,
        drain_s: float = 0.0,
        corpus: TokenCorpus | None = None,
        draft: Engine | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        """`corpus`, `draft`: where drafts come from; None: nothing is drafted."""
        self.engine = engine or FakeEngine(cells=1 << 15)
        files = ChunkFiles(folder, self.engine.fingerprint) if folder else None
        self.store = KvStore(
            self.engine.fingerprint, Budgets(warm, cold), files, keeping=Keeping(chunk_tokens=chunk_tokens)
        )
        self.store.costs.evaluate = Unmeasured()
        draft_max = 8 if corpus is not None or draft is not None else 0
        settings = SchedulerSettings(parallel, prefill_slice, drain_s=drain_s, memory=memory, draft_max=draft_max)
        self.draft_store = self._draft_store(draft, folder, Budgets(warm, cold)) if draft else None
        loaded = LoadedDraft("small", draft, self.draft_store) if draft and self.draft_store else None
        self.scheduler = Scheduler(self.engine, self.store, settings, draft=loaded)
        # Rows that cost nothing: whatever may be drafted is.
        self.scheduler._parts.speculation._seconds = lambda rows, depth, outputs: 1.0
        if corpus is not None:
            self.scheduler._parts.speculation._corpus = corpus

    def _draft_store(self, draft: Engine, folder: Path | None, budgets: Budgets) -> KvStore:
        files = ChunkFiles(folder, draft.fingerprint) if folder else None
        store = KvStore(draft.fingerprint, budgets, files)
        store.costs.evaluate = Unmeasured()
        return store

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.scheduler.close()
        for store in self.scheduler.stores:
            store.close()

    def sequence(
        self,
        tokens: Iterable[int],
        recorder: Recorder | None = None,
        *,
        sampling: Sampling = GREEDY,
        on_full: Callable[[], bool] | None = None,
        approximate: Approximation | None = None,
        label: Label | None = None,
        stable: Stable | None = None,
        top_logprobs: int | None = None,
        deadline: float | None = None,
        **more,
    ) -> Sequence_:
        """`more`: fields of the prompt and of the request."""
        recorder = recorder or Recorder()
        if on_full is not None:
            recorder.full = on_full  # type: ignore[method-assign]
        if not self.engine.capabilities.kv_unit.has_snapshots:
            more.pop("borders", None)
        of_request = {name: more.pop(name) for name in list(more) if name in _REQUEST}
        execution = Execution(**{name: more.pop(name) for name in list(more) if name in _EXECUTION})
        sequence = Sequence_(
            prompt_of(tokens, **more),
            Request(**of_request, top_logprobs=top_logprobs, execution=execution),
            Sampler(sampling, top_logprobs=top_logprobs),
            recorder,
            approximation=approximate,
        )
        sequence.label, sequence.stable, sequence.deadline = label, stable, deadline
        return sequence

    def start(self, tokens: Iterable[int], recorder: Recorder | None = None, **more) -> Recorder:
        recorder = recorder or Recorder()
        self.scheduler.submit(self.sequence(tokens, recorder, **more))
        return recorder

    def run(self, tokens: Iterable[int], recorder: Recorder | None = None, **more) -> Recorder:
        """Submit a sequence, wait for it, and for what the loop does after it."""
        recorder = self.start(tokens, recorder, **more).wait()
        self.settle()
        return recorder

    def cancel_at(self, gate: Gate, tokens: Iterable[int], **more) -> Recorder:
        """Submit a sequence, and cancel it while the gate holds the engine."""
        sequence = self.sequence(tokens, recorder := Recorder(), **more)
        self.scheduler.submit(sequence)
        gate.reached()
        self.scheduler.cancel(sequence)
        gate.open()
        self.settle()
        return recorder

    def settle(self) -> None:
        """Wait until nothing runs."""
        while self.scheduler.call(self.scheduler._is_busy).result(PATIENCE):
            pass


_REQUEST = {field.name for field in fields(Request)} - {"namespace", "prediction"}
_EXECUTION = {field.name for field in fields(Execution)} - {"lineage"}


def prompt_of(
    tokens: Iterable[int],
    *,
    max_new: int = 12,
    closing: tuple[int, ...] = CLOSING,
    namespace: str | Lineage = EXACT,
    lineage: Lineage | None = None,
    given: bool = False,
    affinity: str | None = None,
    **more,
) -> Prompt:
    """What `PromptBuilder` would make of these tokens."""
    ids = np.fromiter(tokens, np.int32)
    return Prompt(
        messages=(),
        written=SeamedText(""),
        tokenized=TokenizedText(ids.tolist(), [], is_given=given),
        tokens=ids,
        lineage=lineage or lineage_of(namespace),
        keys=CacheKeys(affinity, None, None, None),
        closing=closing,
        max_new=max_new,
        **more,
    )


class Gate:
    """Holds an engine at the beginning of the steps that `holds` picks out."""

    def __init__(self, engine: FakeEngine, holds: Callable[[int], bool] = lambda step: step == 0) -> None:
        self._holds = holds
        self._step = -1
        self._entered = threading.Event()
        self._open = threading.Event()
        engine.on_evaluate = self._on_evaluate

    def _on_evaluate(self, batch: Sequence[Rows]) -> None:
        self._step += 1
        if self._holds(self._step):
            self.hold()

    def hold(self) -> None:
        self._entered.set()
        assert self._open.wait(PATIENCE)

    def reached(self) -> None:
        assert self._entered.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()


class HeldDisk(Gate):
    """Holds everything that a store reads."""

    def __init__(self, store: KvStore) -> None:
        self._entered, self._open = threading.Event(), threading.Event()
        files = store._disk.files
        read = files.read

        def held(expected):
            self.hold()
            return read(expected)

        files.read = held


def reference(
    tokens: Iterable[int], *, sampling: Sampling = GREEDY, max_new: int = 12, engine: FakeEngine | None = None
) -> list[int]:
    """What an engine that has never seen anything answers."""
    engine, sampler = engine or FakeEngine(cells=1 << 15), Sampler(sampling)
    todo = np.fromiter(tokens, np.int32)
    start, answer = 0, []
    while len(answer) < max_new:
        engine.evaluate([Rows(0, start, todo, outputs=1)])
        token, _ = sampler.sample(engine.logits(0), engine.vocab.pieces)
        if token in engine.vocab.eog:
            break
        answer.append(token)
        start, todo = start + len(todo), np.array([token], np.int32)
    return answer


def unique_prefix_tokens(sequences: Iterable[Sequence[int]]) -> int:
    """How many positions there are when equal prefixes are counted once."""
    nodes: dict[tuple[int, int], int] = {}
    for sequence in sequences:
        node = 0
        for token in sequence:
            node = nodes.setdefault((node, token), len(nodes) + 1)
    return len(nodes)


def text(length: int, seed: int = 0) -> list[int]:
    tokens: TokenArray = np.random.default_rng(seed).integers(32, 127, length, dtype=np.int32)
    return tokens.tolist()


PROMPT = text(700)
LONG = text(2000)


def no_pins(rig: Rig) -> bool:
    return all(chunk.pins == 0 for chunk in chunks_of(rig.store))


class Unmeasured(Rate):
    """The fake engine is too quick to measure."""

    def measure(self, amount: float, seconds: float) -> None:
        pass


class LateExport:
    is_done = False

    def __init__(self, engine: LateEngine, copies: Exported) -> None:
        self._engine = engine
        self._copies = copies

    def payloads(self) -> list[Payload]:
        self._engine.asked += 1
        if self._engine.asked in self._engine.failing:
            raise EngineError("the device is gone")
        return self._copies.payloads()


class LateEngine(FakeEngine):
    """What it copies is never there before it is asked for."""

    def __init__(self, *, failing: Sequence[int] = (), **settings: int) -> None:
        super().__init__(**{"cells": 1 << 15} | settings)
        self.failing = failing
        """Which of the exports that were asked for fail, from 1 on."""
        self.begun = self.asked = self.copied_tokens = 0

    def export_kv(self, sequence: int, borders: Sequence[int], bits: int = 16) -> KvExport:
        self.begun += 1
        self.copied_tokens += borders[-1] - borders[0]
        return LateExport(self, super().export_kv(sequence, borders, bits))


class DeviceEngine(LateEngine):
    """Chooses tokens itself, and lets others work while it computes."""

    draws = True

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        outcome = super().evaluate(batch)
        if outcome is Outcome.DONE:
            self.meanwhile()
        return outcome
