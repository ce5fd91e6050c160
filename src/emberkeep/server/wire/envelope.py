"""What every object of one answer has in common."""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass

from emberkeep.backend.base import ModelCard
from emberkeep.types import Json


@dataclass(frozen=True, slots=True)
class Envelope:
    id: str
    created: int
    model: str
    system_fingerprint: str
    conversation_id: str | None

    def head(self, kind: str) -> dict[str, Json]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def new_envelope(prefix: str, card: ModelCard, conversation_id: str | None) -> Envelope:
    return Envelope(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=card.id,
        system_fingerprint="fp_" + hashlib.sha256(repr(card).encode()).hexdigest()[:12],
        conversation_id=conversation_id,
    )
