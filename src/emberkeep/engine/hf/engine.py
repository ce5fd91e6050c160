"""The Hugging Face engine: one model of transformers, a paged pool of keys and values, batches without padding."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from emberkeep.engine.base import (
    DRAFT_ROWS,
    Blended,
    Capabilities,
    Footprint,
    KvExport,
    KvUnit,
    Logits,
    Logprobs,
    Outcome,
    Payload,
    Piece,
    Rows,
    check_splice,
)
from emberkeep.engine.facts import Facts
from emberkeep.engine.hf.blend import FULL_LAYERS, evaluate_blended, learn_rotations
from emberkeep.engine.hf.expert_counter import HookExpertCounter
from emberkeep.engine.hf.footprint import affordable_cells, footprint, measure_step, peak_bytes, with_step
from emberkeep.engine.hf.model_loader import HfModel, HfSettings, fingerprint
from emberkeep.engine.hf.network import Network, Tiers, learn
from emberkeep.engine.hf.own_steps import OwnSteps, run_by_model
from emberkeep.engine.hf.pool import BLOCK, BlockPool, BlockTable, KvMemory
from emberkeep.engine.hf.staging import ChosenTokens, DeviceExport, Found, HostLogits, Mark, translate_errors
from emberkeep.engine.hf.transfer import Transfer
from emberkeep.engine.step_table import IdleSteps
from emberkeep.errors import EngineError
from emberkeep.types.models import AttentionTier
from emberkeep.types.request import Json

log = logging.getLogger("emberkeep.engine")
_MEMORY = "memory of a step"
"""What is remembered."""


class HfEngine:
    """See `Engine` for the contracts.

    Only what the fingerprint and plans depend on is found out before it is open. What makes steps quicker, and
    measures them, is done by `improve`; until then steps are launched kernel by kernel, and what was measured by
    the latest start counts.
    """

    @torch.no_grad()
    def __init__(self, model: HfModel, settings: HfSettings, weights_digest: str) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._network = Network(model.network)
        self.vocab = model.vocab
        self.attention = Tiers(self._network.device, settings.attention)
        learned = learn(self._network)
        layers = learned.layers
        self._rotations = learn_rotations(self._network)
        self.experts = HookExpertCounter.of(
            model.network, self._network.device, lambda: learn(self._network), self._record_anew
        )
        cells = settings.cells or affordable_cells(model, layers, learned.dtype, settings)
        # A block more for each sequence, whose last one is not full: `cells` tokens then always fit.
        self._pool = BlockPool(cells + settings.sequences * BLOCK)
        self._memory = KvMemory(layers, self._pool.total_cells, learned.dtype, self._network.device)
        self._transfer = Transfer(self._memory, settings.chunk)
        self._tables: defaultdict[int, BlockTable] = defaultdict(BlockTable)
        self._loading: dict[int, Mark] = {}
        """When the state of a sequence is there that the device was told to load."""
        self._outputs = HostLogits(self._network.device, settings.sequences + DRAFT_ROWS, model.vocab.size)
        self._found: list[Found] = []
        self.capabilities = Capabilities(
            kv_unit=KvUnit.RANGE,
            can_shift=self._rotations is not None,
            max_sequences=settings.sequences,
            cells=cells,
            context=min(settings.context, cells),
            batch=settings.batch,
            outputs=settings.sequences + DRAFT_ROWS,
            kv_bytes_per_token=self._memory.bytes_per_token,
            snapshot_bytes=0,
            layers=len(layers),
            sees_all=False,
            can_blend=self._rotations is not None and len(self._network.layers) > FULL_LAYERS,
            packs=self._transfer.packs,
            joins_last=True,
        )
        self._settings, self._stream, self._learned = settings, model.stream, learned
        self._steps = OwnSteps(self, self._network, self._memory, learned, model.stream)
        shapes = [(len(g.streams), g.shape.heads, g.shape.width) for g in self._memory.groups]
        self._identify = partial(
            fingerprint, model, [str(learned.dtype), shapes], weights_digest, stored=settings.stored
        )
        self._facts = self._open_facts()
        try:
            self._steps.choose(self._facts, [self._measure_memory, self._prepare])
        except EngineError:
            self._steps.close()  # who computes this model otherwise needs the memory now
            raise
        graphs, own = self._steps.graphs, self._steps.layers
        self._fingerprints = {tier: self._identify(tier, layers=own) for tier in self.attention.available}
        self._estimate = footprint(model, self._memory, layers, settings, has_masks=graphs is None)
        known = self._facts.read_json(_MEMORY, partial(with_step, self._estimate))
        self.footprint: Footprint | None = known or self._estimate

    # ── evaluating ──

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    @torch.no_grad()
    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        if self._steps.refusal:
            raise EngineError(self._steps.refusal)
        tables = [self._tables[rows.sequence] for rows in batch]
        for rows, table in zip(batch, tables, strict=True):
            if table.length != rows.start:
                raise EngineError(f"Sequence {rows.sequence} cannot go on at {rows.start}.")
        self._settle(*(rows.sequence for rows in batch))
        graphs, flights = self._steps.graphs, self._steps.flights if self.draws else None
        known = flights.known(batch) if flights else {}
        further = [known[index].steps - 1 if index in known else 0 for index in range(len(batch))]
        ends = [rows.start + len(rows.tokens) + more for rows, more in zip(batch, further, strict=True)]
        with self._grow(tables, ends) as has_room:
            if not has_room:
                return Outcome.NO_ROOM
            self._found = []
            if graphs and flights:
                may = self._stream is None and self.experts is None
                self._found, logits = flights.run(graphs, batch, tables, known, self.meanwhile, may_run_ahead=may)
                self._outputs.take(logits)
            else:
                self._take_logits(self._run(batch, tables), [rows.outputs for rows in batch])
            self._transfer.let_go()
            self._count_experts()
        return Outcome.DONE

    def _run(self, batch: Sequence[Rows], tables: Sequence[BlockTable]) -> torch.Tensor:
        return run_by_model(self._network, self._memory, self.attention.tier, batch, tables)

    def _take_logits(self, logits: torch.Tensor, outputs: Sequence[int]) -> None:
        """`outputs`: how many rows of `logits` each of the batch has. Blocks until they are computed."""
        chosen = ChosenTokens(logits.argmax(-1).tolist()) if logits.device.type == "cuda" else None
        self._outputs.take(logits)
        self._found = [Found(chosen, first) for first in accumulate(outputs[:-1], initial=0)]

    def _count_experts(self) -> None:
        if self.experts is not None:
            self.experts.step_done()

    def logits(self, index: int, row: int = 0) -> Logits:
        taken: Logits = self._outputs.rows()[self._found[index].first + row]
        return taken

    def likeliest(self, index: int, row: int = 0) -> int:
        found = self._found[index]
        if found.chosen is None:
            return int(self.logits(index, row).argmax())
        return found.chosen.tokens[found.first + row]

    def logprobs(self, index: int, row: int) -> Logprobs:
        return self._found[index].logprobs(row)

    def went_on(self, index: int) -> list[int]:
        return self._found[index].went_on

    @property
    def draws(self) -> bool:
        return self._steps.graphs is not None and self.attention.tier is AttentionTier.OWN

    @property
    def is_ahead(self) -> bool:
        return self._steps.flights is not None and self._steps.flights.is_ahead

    def reserve(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> bool:
        """Room for so many more tokens of each."""
        copies = self._pool.reserve(tables, counts, self.capabilities.context)
        if copies:
            self._transfer.before_overwriting([copy.source for copy in copies])
            self._memory.copy(copies)
        return copies is not None

    def _changes(self, sequence: int) -> None:
        """Its state is about to become another than the latest step left."""
        if self._steps.flights is not None:
            self._steps.flights.forget(sequence)

    # ── moving state in and out ──

    @torch.no_grad()
    def export_kv(self, sequence: int, borders: Sequence[int], bits: int = 16) -> KvExport:
        table = self._tables[sequence]
        if borders[-1] > table.length:
            raise EngineError(f"Sequence {sequence} does not reach from {borders[0]} to {borders[-1]}.")
        if bits not in self.capabilities.packs:
            raise EngineError(f"This model's state cannot be stored in {bits} bits.")
        with translate_errors():
            self._settle(sequence)
            return DeviceExport(*self._transfer.export(table, borders, bits), self._transfer.whole)

    def export_snapshot(self, sequence: int) -> Payload:
        raise EngineError("This model's state has nothing that could be kept as a snapshot.")

    @torch.no_grad()
    def import_kv(
        self, sequence: int, start: int, end: int, payloads: Sequence[Payload], payload_start: int
    ) -> Outcome:
        with translate_errors():
            borders = self._transfer.check(payloads, payload_start)
        if not payload_start <= start < end <= borders[-1]:
            raise EngineError("A stored KV payload does not hold the positions asked for.")
        table = self._tables[sequence]
        if table.length != start:
            raise EngineError(f"Sequence {sequence} does not end at {start}, so nothing can be appended there.")
        self._changes(sequence)
        with self._grow([table], [end]) as has_room:
            if not has_room:
                return Outcome.NO_ROOM
            self._loading[sequence] = self._transfer.load(table, start, end, payloads, borders)
        return Outcome.DONE

    def payload_buffer(self, size: int) -> memoryview | None:
        transfer = self._transfer  # the engine may be closed meanwhile
        return transfer.payload_buffer(size) if transfer is not None else None

    def is_loading(self, sequence: int) -> bool:
        mark = self._loading.get(sequence)
        if mark is None:
            return False
        with translate_errors():
            return not mark.has_passed

    def import_snapshot(self, sequence: int, position: int, payload: Payload) -> Outcome:
        raise EngineError("This model's state has nothing that could be restored from a snapshot.")

    # ── state from other positions: cacheblend, splice ──

    @torch.no_grad()
    def blend(self, rows: Rows, pieces: Sequence[Piece], ratio: float) -> Blended:
        with translate_errors():
            moved = [(piece, self._reposition(piece)) for piece in pieces]
        table, end = self._tables[rows.sequence], rows.start + len(rows.tokens)
        if table.length != rows.start:
            raise EngineError(f"Sequence {rows.sequence} cannot go on at {rows.start}.")
        self._changes(rows.sequence)
        self._settle(rows.sequence)
        with self._grow([table], [end]) as has_room:
            if not has_room:
                return Blended(Outcome.NO_ROOM)
            known = np.zeros(len(rows.tokens), bool)
            for piece, parts in moved:
                self._transfer.write(table, piece.start, piece.end, parts)
                known[piece.start - rows.start : piece.end - rows.start] = True
            tier = self.attention.tier
            logits, blended = evaluate_blended(self._network, self._memory, tier, rows, table, known, ratio)
            if logits is not None:
                self._take_logits(logits, [rows.outputs])
                self._count_experts()
            return blended

    def _reposition(self, piece: Piece) -> list[torch.Tensor]:
        """The rows of a piece as they are at its new position. Raises EngineError."""
        if self._rotations is None:
            raise EngineError("This model's state cannot be moved to another place.")
        rows = self._transfer.rows(piece.payload, piece.payload_start)
        begin = piece.source - piece.payload_start
        count = piece.end - piece.start
        if not 0 <= begin < begin + count <= rows[0].shape[1]:
            raise EngineError("A stored KV payload does not hold the positions asked for.")
        # A copy: the payload is read-only, and turning writes.
        return self._rotate([part[:, begin : begin + count].clone() for part in rows], piece.start - piece.source)

    def copy_kv(self, source: int, target: int, end: int) -> None:
        assert not self._tables[target].length
        self._settle(source)
        self._tables[target] = self._pool.share(self._tables[source], end)

    def trim(self, sequence: int, start: int) -> None:
        self._changes(sequence)
        self._settle(sequence)
        self._transfer.before_overwriting(self._tables[sequence].blocks[start // BLOCK :])
        self._pool.trim(self._tables[sequence], start)
        if start == 0:
            del self._tables[sequence]

    @torch.no_grad()
    def splice(self, sequence: int, start: int, end: int, insert: npt.NDArray[np.int32]) -> Outcome:
        """Should the model fail in the middle of it, the sequence is emptied and StepFailed is raised."""
        table, stop = self._tables[sequence], start + len(insert)
        check_splice(self.capabilities, table.length, start, end, insert)
        self._changes(sequence)
        self._settle(sequence)
        with translate_errors():
            rows = self._transfer.read(table, end, table.length) if end < table.length else []
            followers = self._rotate(rows, stop - end) if rows else []
        self._transfer.before_overwriting(table.blocks[start // BLOCK :])
        copies = self._pool.regrow(table, start, table.length + stop - end)
        if copies is None:
            return Outcome.NO_ROOM
        try:
            with translate_errors():
                self._memory.copy(copies)
                self._insert(Rows(sequence, start, insert, outputs=0), table)
                self._count_experts()
                if followers:
                    self._transfer.write(table, stop, table.length, followers)
        except EngineError:
            self._forget_experts()
            self.trim(sequence, 0)
            raise
        return Outcome.DONE

    def _insert(self, rows: Rows, table: BlockTable) -> None:
        """Evaluate `rows` as if they were the last of the table, which has room for them."""
        self._found = []
        step = self.capabilities.batch
        for begin in range(0, len(rows.tokens), step):
            tokens = rows.tokens[begin : begin + step]
            part = Rows(rows.sequence, rows.start + begin, tokens, outputs=0)
            self._run([part], [BlockTable(table.blocks, part.start + len(tokens))])

    def _rotate(self, rows: list[torch.Tensor], by: int) -> list[torch.Tensor]:
        """Rows as they would be so many positions further on. Changes `rows`."""
        assert self._rotations is not None
        for group, part in zip(self._memory.groups, rows, strict=True):
            distance = torch.full((part.shape[1],), by, device=part.device)
            for index, (layer, is_keys) in enumerate(group.streams):
                if is_keys:
                    part[index] = self._rotations[layer](part[index], distance)
        return rows

    # ── about itself ──

    @property
    def fingerprint(self) -> bytes:
        """Follows the tier in use."""
        return self._fingerprints[self.attention.tier]

    def rest(self) -> None:
        pass

    def step_seconds(self, rows: int, depth: int, outputs: int) -> float | None:
        table = self._steps.table
        return table.seconds(rows, depth, outputs) if table else None

    def peak_bytes(self) -> int | None:
        return peak_bytes(self._network.device)

    def stats(self) -> dict[str, Json]:
        streaming: dict[str, Json] = {"streaming": self._stream.stats()} if self._stream else {}
        graphs = self._steps.graphs
        recorded: dict[str, Json] = {"recorded_steps": graphs.stats()} if graphs else {}
        return {"pool": self._pool.stats(), **recorded, **streaming}

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
        self._tables.clear()
        self._loading.clear()
        self._steps.close()
        if self._stream is not None:
            self._stream.close()
        if self.experts is not None:
            self.experts.close()
        self._identify = None  # type: ignore[assignment]
        self._transfer = None  # type: ignore[assignment]
        self._memory = None  # type: ignore[assignment]
        self._network = None  # type: ignore[assignment]

    def _settle(self, *sequences: int) -> None:
        """What the device is told next waits for state of these that is still being loaded."""
        for sequence in sequences if self._loading else ():
            mark = self._loading.pop(sequence, None)
            if mark is not None:
                mark.hold_back()

    @contextmanager
    def _grow(self, tables: Sequence[BlockTable], ends: Sequence[int]) -> Iterator[bool]:
        """Room in every table up to its end, or in none; taken back if what follows fails."""
        lengths = [table.length for table in tables]
        copies = self._pool.grow_all(tables, ends)
        has_room = copies is not None
        if copies:
            # Whoever shared a block with a table may have it alone now, and write to it.
            self._transfer.before_overwriting([copy.source for copy in copies])
            self._memory.copy(copies)
        try:
            with translate_errors():
                yield has_room
        except EngineError:
            self._forget_experts()
            for table, length in zip(tables, lengths, strict=True):
                self._pool.trim(table, length)
            raise

    def _forget_experts(self) -> None:
        if self.experts is not None:
            with suppress(RuntimeError):  # a device that has failed says so to the next step, too
                self.experts.step_failed()

    # ── which code computes steps ──

    def _open_facts(self) -> Facts:
        settings, stream = self._settings, self._stream
        return Facts(
            settings.facts,
            self._identify(self.attention.tier, stored=None).hex(),  # by whichever name its state is stored
            [settings.batch, settings.context, settings.sequences, torch.get_num_threads()],
            [stream.plan.streamed, stream.can_record] if stream else None,
        )

    def empty(self) -> None:
        """Forget every sequence."""
        for sequence in list(self._tables):
            self.trim(sequence, 0)

    @torch.no_grad()
    def _record_anew(self) -> None:
        self.empty()
        if self._steps.graphs is not None:
            self._steps.graphs.record_anew()

    # ── in gaps ──

    @property
    def can_improve(self) -> bool:
        return bool(self._steps.chores)

    @torch.no_grad()
    def improve(self, is_wanted: Callable[[], bool]) -> bool:
        with self.experts.pausing() if self.experts is not None else nullcontext():
            return self._steps.improve(is_wanted)

    def _measure_memory(self, steps: IdleSteps) -> None:
        # What is always there was counted before anything was stored.
        step = measure_step(self._estimate, self._network.device, steps, self._settings.batch)
        self.footprint = with_step(self._estimate, step)
        self._facts.remember_json(_MEMORY, step)

    def _prepare(self, _: IdleSteps) -> None:
        self._transfer.prepare()
