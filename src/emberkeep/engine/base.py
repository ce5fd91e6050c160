"""The engine seam: a step engine that the scheduler drives.

An engine holds the KV state of up to `max_sequences` sequences in a pool of `cells` token cells. It knows
nothing of requests, chunks or chats. One thread owns it: no method may be called from any other thread,
except that `vocab` is immutable and free for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from emberkeep.types import ExpertStats, Vocab

Logits = npt.NDArray[np.float32]
Payload = memoryview
"""KV bytes of a token range, in the engine's own layout. Read-only for everyone but the engine."""


class KvUnit(StrEnum):
    """How a sequence's state can be taken apart.

    Whatever is not by range is in a snapshot: the state after exactly the tokens evaluated so far. A sequence
    is restored by importing its ranges, and then the snapshot that was taken where they end.
    """

    RANGE = "range"  # any token range can be exported and imported: attention
    SNAPSHOT = "snapshot"  # only as a whole, at one position: recurrent models
    BOTH = "both"  # attention by range, the rest (recurrent or sliding-window layers) as a whole

    @property
    def has_ranges(self) -> bool:
        return self is not KvUnit.SNAPSHOT

    @property
    def has_snapshots(self) -> bool:
        return self is not KvUnit.RANGE


@dataclass(frozen=True, slots=True)
class Capabilities:
    kv_unit: KvUnit
    can_shift: bool
    max_sequences: int
    cells: int
    """Token cells shared by all sequences."""
    context: int
    """Longest single sequence."""
    batch: int
    """Most rows that one `evaluate` takes."""
    kv_bytes_per_token: int
    """Of what is by range."""
    snapshot_bytes: int
    """Of one snapshot, at most; 0 without."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive tokens of one sequence, evaluated at positions `start ..`."""

    sequence: int
    start: int
    tokens: npt.NDArray[np.int32]
    want_logits: bool
    """Whether logits are needed after the last of these tokens."""


class Outcome(Enum):
    DONE = "done"
    NO_ROOM = "no room"  # nothing was evaluated: free cells and try again


class ExpertTracking(Protocol):
    """Counts which experts of a mixture are chosen. Off at first, and then it costs nothing."""

    def track(self, enabled: bool) -> None:
        """Switching it on or off empties every sequence and blocks for as long as opening the context takes.

        Raises EngineError, and the engine is then unusable.
        """

    def reset(self) -> None:
        """Begin to count anew."""

    def stats(self) -> ExpertStats:
        """What was counted in steps that are over. May be called from any thread."""


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def vocab(self) -> Vocab: ...

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that change whenever anything that shapes KV bytes changes."""

    @property
    def experts(self) -> ExpertTracking | None:
        """None for a model that has none to choose from."""

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        """Extend each named sequence. Blocks for one step. Raises EngineError when the engine is unusable."""

    def logits(self, index: int) -> Logits:
        """Logits after the last token of `batch[index]` of the latest `evaluate`, which wanted them.

        A view into the engine's memory: valid and unmodified until the next `evaluate`.
        """

    def export_kv(self, sequence: int, borders: Sequence[int]) -> list[Payload]:
        """Copies of the state between consecutive positions of `borders`. The sequence stays as it is.

        Empty payloads where the state has no ranges. Raises EngineError.
        """

    def export_snapshot(self, sequence: int) -> Payload:
        """A copy of what is not by range, as it is after everything evaluated so far. Raises EngineError."""

    def import_kv(self, sequence: int, start: int, end: int, payload: Payload, payload_start: int) -> Outcome:
        """Append positions [start, end) to `sequence`, whose state must end at `start`.

        `payload` holds a range that begins at `payload_start <= start` and reaches to `end` or beyond.
        Raises EngineError, with the sequence unchanged, when the payload does not have this engine's shape.
        """

    def import_snapshot(self, sequence: int, position: int, payload: Payload) -> Outcome:
        """Let `sequence`, whose ranges end at `position` (if its state has any), go on from there.

        Between the first `import_kv` and this, a sequence of a model with snapshots cannot be evaluated. Raises
        EngineError, and the sequence must then be trimmed to 0, when the payload does not have this engine's
        shape or was not taken at `position`.
        """

    def copy_kv(self, source: int, target: int, end: int) -> None:
        """Make `target` (which must be empty) share positions [0, end) of `source`. No bytes of ranges are copied.

        With snapshots, `end` must be where `source` ends.
        """

    def trim(self, sequence: int, start: int) -> None:
        """Forget positions from `start` on. With snapshots, only 0 and the sequence's end are possible."""

    def shift(self, sequence: int, start: int, end: int) -> None:
        """Cut positions [start, end) out and move what follows down. The result is approximate."""

    def close(self) -> None:
        """Release everything. Calling it twice is harmless."""
