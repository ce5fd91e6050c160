"""Why no more of a prompt was reused than was."""

from __future__ import annotations

import numpy as np

from emberkeep.engine.base import Engine
from emberkeep.kv.lookups import Match
from emberkeep.kv.store import KvStore
from emberkeep.sched.sequence import Sequence
from emberkeep.sched.slots import HotMatch
from emberkeep.token_arrays import TokenArray
from emberkeep.types.events import Divergence, MissReason

_EXCERPT_TOKENS = 12


class Misses:
    """Belongs to the engine's thread."""

    def __init__(self, engine: Engine, store: KvStore) -> None:
        self._store = store
        self._pieces = engine.vocab.pieces
        self._whole_only = engine.capabilities.kv_unit.has_snapshots

    def reason(self, sequence: Sequence, match: Match, left_behind: TokenArray) -> MissReason:
        """Why not more than the longest of hot and stored state can be reused.

        `left_behind` is what the hot sequence has where the prompt goes on differently.
        """
        prompt = sequence.prompt
        if match.tokens < sequence.computed:
            return self._diverged(sequence, sequence.computed, left_behind)
        if not self._store.fits_engine:
            return MissReason.OTHER_MODEL
        if gone := self._store.why_gone(match.cursor, prompt.tokens):
            return gone
        stored = self._store.stored_after(match.cursor)
        if match.tokens == prompt.reusable or not len(stored):
            return MissReason.NO_SNAPSHOT if self._falls_short(sequence, match) else MissReason.NEW
        return self._diverged(sequence, match.tokens, stored)

    def _diverged(self, sequence: Sequence, reached: int, known: TokenArray) -> MissReason:
        """Note what is known after `reached` tokens, and what the prompt has there."""
        prompt = sequence.prompt
        if not len(known) or reached >= prompt.reusable:
            return MissReason.NEW
        stored_text, prompt_text = self._excerpt(known), self._excerpt(prompt.tokens[reached:])
        sequence.reuse.divergence = Divergence(reached, stored_text, prompt_text)
        return MissReason.DIVERGED

    def _falls_short(self, sequence: Sequence, match: Match) -> bool:
        """The tokens are known, but their state can be resumed only at an earlier place."""
        restored = max(match.snapshot.start if match.snapshot else 0, sequence.computed)
        return self._whole_only and restored < match.tokens

    def _excerpt(self, tokens: TokenArray) -> str:
        known = [t for t in tokens[:_EXCERPT_TOKENS].tolist() if t < len(self._pieces)]
        return b"".join(self._pieces[t] for t in known).decode("utf-8", "replace")


def left_behind(hot: HotMatch) -> TokenArray:
    """What a sequence has after the part that a prompt shares with it."""
    if hot.sequence is None:
        return np.empty(0, np.int32)
    return hot.sequence.tokens[hot.tokens : hot.sequence.computed][:_EXCERPT_TOKENS].copy()
