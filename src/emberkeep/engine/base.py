"""The engine seam: a step engine that the scheduler drives.

An engine holds the KV state of up to `max_sequences` sequences in a pool of `cells` token cells. It knows
nothing of requests, chunks or chats. One thread owns it: no method may be called from any other thread,
except that `vocab` is immutable and free for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import Enum, StrEnum
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from emberkeep.errors import EngineError
from emberkeep.types.models import AttentionTier, ExpertStats, Vocab
from emberkeep.types.request import Json
from emberkeep.values import dataclass

Logits = npt.NDArray[np.float32]
Payload = memoryview
"""KV bytes of a token range, in the engine's own layout. Read-only outside of the engine."""
Bias = tuple[tuple[int, float], ...]
"""What is added to the logits of some tokens. Compared by identity: one object for each request."""
MOST_BIASED = 32
"""Tokens of one sequence that are biased where its tokens are chosen."""
MOST_TOLD = 20
"""Likeliest tokens that are told where a token is chosen."""
Logprobs = tuple[float, list[tuple[int, float]]]
"""The chosen token's log probability, and the likeliest tokens with theirs, the likeliest first: under the model's
own distribution, before anything is added to it."""
DRAFT_ROWS = 64
"""Drafted tokens in one step, at most."""


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
    outputs: int
    """Most rows after which one `evaluate` gives logits."""
    kv_bytes_per_token: int
    """Bytes of what is kept by range."""
    snapshot_bytes: int
    """Bytes of one snapshot at most; 0 where there are none."""
    layers: int = 1
    sees_all: bool = True
    """A row of a step takes as long as if it looked at the tokens of every sequence in the step; else at those of
    its own."""
    can_blend: bool = False
    """State can be repositioned (`blend`)."""
    packs: frozenset[int] = frozenset({16})
    """Bits in which ranges can be exported; any of them can be imported."""
    runs_ahead: bool = False
    """`evaluate` returns while a step without outputs still runs, and `export_kv` waits for it. Not with
    snapshots, which are exported right after the step that ends where they are."""
    wide_rows: int | None = None
    """Rows of one sequence in a step from which on its state has the same bytes however it is cut into such steps,
    while the engine holds nothing else; None where each number of rows rounds in its own way."""
    joins_last: bool = False
    """The last token of a prompt is evaluated with those before it. Else it is a step of its own, so that its
    scores are the same whether the others were loaded or computed."""
    resting_cells: int | None = None
    """Those of `cells` whose memory the engine keeps when it rests, however little is in them; None: all."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """What is taken from the logits of an answer's tokens, as `sched/sampling` does it."""

    answer: object
    """Is another one for each answer, and holds nothing of it."""
    repetition: float
    frequency: float
    presence: float
    said: list[int]
    """The tokens, the latest one last: it grows with each."""
    counts: Counter[int]
    """How often each of them came."""


@dataclass(frozen=True, slots=True)
class Choosing:
    """How the token after a row is chosen where the logits are, as `sched/sampling` does it: the likeliest, or one
    drawn."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: Callable[[int], float] = lambda further: 0.0
    """The random number for this token, or for one so many further on."""
    bias: Bias = ()
    penalties: Penalties | None = None
    top_logprobs: int | None = None
    """How many of the likeliest tokens are told (`Engine.logprobs`); None: not even the chosen one's chance."""
    mask: npt.NDArray[np.uint32] | None = None
    """Packed bits over the vocabulary, lowest first, set where a token is allowed; None: everything is. Read by
    `evaluate` only."""

    @property
    def is_adjusted(self) -> bool:
        """More is wanted than choosing by temperature and bias."""
        return self.penalties is not None or self.top_logprobs is not None or self.mask is not None


@dataclass(slots=True)
class Rows:
    """Consecutive tokens of one sequence, evaluated at positions `start ..`.

    Never changed. Not frozen: one is made for every token, in a third of the time so.
    """

    sequence: int
    start: int
    tokens: npt.NDArray[np.int32]
    outputs: int
    """After how many of these tokens, the last ones, logits are needed: 1 where the next token is sampled, more
    where the last tokens are a draft of which it is not known yet whether it is accepted."""
    choosing: Choosing | None = None
    """None: who looks at the logits chooses the next token. Else nobody looks at them."""
    goes_on: int = 0
    """So many of the next steps, at most, will most likely have this sequence with nothing but the token that was
    chosen, so they may begin at once."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Stored state of a range that is put where it was not computed."""

    start: int
    end: int
    """The positions of the sequence that it goes to."""
    payload: Payload
    payload_start: int
    """The position at which `payload` begins."""
    source: int
    """The position in `payload` that goes to `start`."""


class Outcome(Enum):
    DONE = "done"
    NO_ROOM = "no room"  # nothing was evaluated: free cells and try again


@dataclass(frozen=True, slots=True)
class Blended:
    outcome: Outcome
    repaired: int = 0
    """Tokens of pieces that were evaluated again."""
    token_layers: int = 0
    """How many tokens went through how many layers, in all."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What an engine's memory is made of, so that the peak of a request can be predicted. In bytes.

    A step of `slice` prompt tokens in a sequence of `context` tokens needs
    `fixed + slice * per_step_token + context * per_context_token + slice * context * per_pair` and a row of logits
    for every sequence that wants one.
    """

    device: str
    """`cpu`, `cuda:0`, ...: whose memory it is."""
    capacity: int
    """What this engine may use in all."""
    fixed: int
    """There whatever is asked: weights, the pool of KV cells, buffers."""
    per_step_token: float
    per_context_token: float
    per_pair: float
    per_logits_row: int
    in_ram: int = 0
    """What the engine holds in RAM besides, where `device` is a GPU."""

    def json(self) -> dict[str, Json]:
        return asdict(self)


class KvExport(Protocol):
    """Copies of state on their way out of an engine. Belongs to the engine's thread, and may be dropped at any
    time."""

    @property
    def is_done(self) -> bool:
        """They are there, or will never be: `payloads` does not block. Never raises."""

    def payloads(self) -> list[Payload]:
        """Blocks until they are there. Raises EngineError."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Copies that were made at once. See `KvExport`."""

    copies: list[Payload]
    is_done: ClassVar[bool] = True

    def payloads(self) -> list[Payload]:
        return self.copies


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


class AttentionTiers(Protocol):
    """Which code computes attention."""

    @property
    def tier(self) -> AttentionTier:
        """The one in use. May be read from any thread."""

    @property
    def available(self) -> tuple[AttentionTier, ...]:
        """The fastest first."""

    def switch(self, tier: AttentionTier) -> None:
        """Use another one from the next step on. Raises EngineError for one that is not available.

        State of two tiers differs in its bytes, and the engine's fingerprint changes: empty its sequences first.
        """


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def vocab(self) -> Vocab: ...

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that change whenever anything that shapes KV bytes changes, `attention.tier` for instance."""

    @property
    def experts(self) -> ExpertTracking | None:
        """None for a model that has none to choose from."""

    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        """Extend each named sequence. Blocks for one step, or for some where it went on by itself.

        Raises EngineError. Then positions before each `rows.start` are as they were if all state is by range; what
        follows them, and everything where there are snapshots, is unknown until it is trimmed.
        """

    def logits(self, index: int, row: int = 0) -> Logits:
        """Logits of the latest `evaluate` after one of the tokens of `batch[index]` that wanted them, by number.

        A view into the engine's memory: valid and unmodified until the next `evaluate` or `splice`. Where every
        row of the batch was chosen here (`Rows.choosing`), there may be none.
        """

    def likeliest(self, index: int, row: int = 0) -> int:
        """The token that was chosen (`Rows.choosing`), else the one that has the highest of these logits, the
        first of several: logits need not leave a device for it."""

    @property
    def logprobs(self) -> Callable[[int, int], Logprobs] | None:
        """What was told (`Choosing.top_logprobs`) of a row of the latest `evaluate`, by the index in its batch and
        by number. None for an engine that never draws."""

    @property
    def went_on(self) -> Callable[[int], list[int]] | None:
        """With which tokens the latest `evaluate` went on by itself, by the index in its batch: it chose and
        evaluated each of them, and `likeliest` knows the one after them, too. None for an engine that never
        draws."""

    @property
    def draws(self) -> bool:
        """Whether it chooses tokens as `Choosing` says; else only the likeliest ones, without a bias."""

    meanwhile: Callable[[], None]
    """What an engine that `draws` calls in every `evaluate`, once the device is at work and before it waits: the
    interpreter is free then. The others do not call it. Set by the scheduler."""

    @property
    def is_ahead(self) -> bool:
        """Whether the steps after the latest one are under way: what they compute is taken where the next
        `evaluate` has the same rows, and is lost where it has not."""

    def export_kv(self, sequence: int, borders: Sequence[int], bits: int = 16) -> KvExport:
        """Copies of the state between consecutive positions of `borders`, as it is now: whatever becomes of the
        sequence and its slot while they are on their way. The sequence stays as it is.

        Empty payloads where the state has no ranges. With fewer than 16 `bits` (one of `packs`) they are smaller
        and no longer exact. Raises EngineError.
        """

    def export_snapshot(self, sequence: int) -> Payload:
        """A copy of what is not by range, as it is after everything evaluated so far. Raises EngineError."""

    def import_kv(
        self, sequence: int, start: int, end: int, payloads: Sequence[Payload], payload_start: int
    ) -> Outcome:
        """Append positions [start, end) to `sequence`, whose state must end at `start`.

        `payloads` hold ranges that follow each other, the first of which begins at `payload_start <= start`; the
        last reaches to `end` or beyond. Raises EngineError, with the sequence unchanged, when one of them does not
        have this engine's shape.
        """

    def payload_buffer(self, size: int) -> memoryview | None:
        """At least `size` bytes, of whole pages, that a payload may be read into: it goes to the device from there
        at full speed. None: any memory will do. Any thread; never raises."""

    def is_loading(self, sequence: int) -> bool:
        """Whether state that was imported is still on its way to the device: a step with this sequence waits for
        it, and others do not."""

    def import_snapshot(self, sequence: int, position: int, payload: Payload) -> Outcome:
        """Let `sequence`, whose ranges end at `position` (if its state has any), go on from there.

        Between the first `import_kv` and this, a sequence of a model with snapshots cannot be evaluated. Raises
        EngineError, and the sequence must then be trimmed to 0, when the payload does not have this engine's
        shape or was not taken at `position`.
        """

    def blend(self, rows: Rows, pieces: Sequence[Piece], ratio: float) -> Blended:
        """Extend a sequence by `rows`, with the state of `pieces` repositioned.

        Tokens outside of all pieces are evaluated. Of the tokens inside, the share `ratio` whose state differs
        most after the first layers is evaluated too; with 0 none is. Pieces lie within `rows`, in order, and do
        not touch its last token if it wants logits. The result is approximate. Blocks for one step. Raises
        EngineError, with the sequence unchanged, when a payload does not have this engine's shape.
        """

    def copy_kv(self, source: int, target: int, end: int) -> None:
        """Make `target` (which must be empty) share positions [0, end) of `source`. No bytes of ranges are copied.

        With snapshots, `end` must be where `source` ends.
        """

    def trim(self, sequence: int, start: int) -> None:
        """Forget positions from `start` on. With snapshots, only 0 and the sequence's end are possible.

        Drafted tokens that were not accepted are taken back so: what is left is as if they had never been there.
        """

    def splice(self, sequence: int, start: int, end: int, insert: npt.NDArray[np.int32]) -> Outcome:
        """Put `insert` (one token or more), evaluated, in place of positions [start, end), and reposition what
        follows to behind it: that still knows what was taken out, so the result is approximate.

        When it returns, every key has been rotated to its new position, and an export holds it so; other sequences
        that share state with this one keep theirs as it was. Blocks for one step. NO_ROOM: nothing has changed.
        Raises EngineError, with the sequence unchanged, unless the engine can (`can_shift`).
        """

    def rest(self) -> None:
        """Give back memory that no sequence uses: nothing has run for a while. Sequences keep their state."""

    @property
    def can_improve(self) -> bool:
        """Whether `improve` has anything to do."""

    def improve(self, is_wanted: Callable[[], bool]) -> bool:
        """Do what only makes later steps quicker, while nothing runs and no sequence has state; soon after
        `is_wanted` says that something waits it returns False, and goes on when it is called again. True: all is
        done."""

    def step_seconds(self, rows: int, depth: int, outputs: int) -> float | None:
        """How long a step of so many rows takes on this machine, with `depth` tokens before each of them in its
        sequence and logits after `outputs` of them; in the quicker way where there are two. None where it was not
        measured. Any thread; never raises."""

    @property
    def footprint(self) -> Footprint | None:
        """None where nothing is known."""

    def peak_bytes(self) -> int | None:
        """The most memory used since this was last asked, as `Footprint` counts it; None where it is not known."""

    @property
    def attention(self) -> AttentionTiers | None:
        """None for an engine that has only one way to compute it."""

    def stats(self) -> dict[str, Json]:
        """Gauges of its own (a pool's blocks), cheap. May be called from any thread."""

    def close(self) -> None:
        """Release everything. Calling it twice is harmless."""


def check_splice(
    capabilities: Capabilities, length: int, start: int, end: int, insert: npt.NDArray[np.int32]
) -> None:
    """What every engine asks before it splices.

    Raises EngineError unless [start, end) of a sequence of `length` tokens can give way to `insert`.
    """
    if not capabilities.can_shift:
        raise EngineError("Nothing can be cut out of this model's state.")
    if not 0 <= start < end <= length:
        raise EngineError(f"Nothing from {start} to {end} can be cut out of a sequence of {length} tokens.")
    if not len(insert):
        raise EngineError("What is cut out of a sequence must give way to one token at least.")
