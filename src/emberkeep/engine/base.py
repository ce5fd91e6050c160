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

from emberkeep.types import Vocab

Logits = npt.NDArray[np.float32]
Payload = memoryview
"""KV bytes of a token range, in the engine's own layout. Read-only for everyone but the engine."""


class KvUnit(StrEnum):
    RANGE = "range"  # any token range can be exported and imported
    SNAPSHOT = "snapshot"  # only the whole state at one position


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


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def vocab(self) -> Vocab: ...

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that change whenever anything that shapes KV bytes changes."""

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        """Extend each named sequence. Blocks for one step. Raises EngineError when the engine is unusable."""

    def logits(self, index: int) -> Logits:
        """Logits after the last token of `batch[index]` of the latest `evaluate`, which wanted them.

        A view into the engine's memory: valid and unmodified until the next `evaluate`.
        """

    def export_kv(self, sequence: int, start: int, end: int) -> Payload:
        """A copy of the state of positions [start, end). The sequence stays as it is."""

    def import_kv(self, sequence: int, start: int, end: int, payload: Payload, payload_start: int) -> Outcome:
        """Append positions [start, end) to `sequence`, whose state must end at `start`.

        `payload` holds a range that begins at `payload_start <= start` and reaches to `end` or beyond.
        Raises EngineError, with the sequence unchanged, when the payload does not have this engine's shape.
        """

    def copy_kv(self, source: int, target: int, end: int) -> None:
        """Make `target` (which must be empty) share positions [0, end) of `source`. No bytes are copied."""

    def trim(self, sequence: int, start: int) -> None:
        """Forget positions from `start` on."""

    def shift(self, sequence: int, start: int, end: int) -> None:
        """Cut positions [start, end) out and move what follows down. The result is approximate."""

    def close(self) -> None:
        """Release everything. Calling it twice is harmless."""
