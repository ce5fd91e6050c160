"""What the latest requests reused and why not more, for whoever looks at the figures."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import asdict

from emberkeep.types import Json, LookupRecord, Request

log = logging.getLogger("emberkeep.backend")

_REMEMBERED = 32


class RecentLookups:
    """Added to and read by any thread."""

    def __init__(self) -> None:
        self._latest: deque[dict[str, Json]] = deque(maxlen=_REMEMBERED)

    def add(self, request: Request, lookup: LookupRecord) -> None:
        record = {
            "conversation_id": request.conversation_id,
            "user": request.user or None,
            "reused_tokens": lookup.reused_tokens,
            **asdict(lookup),
        }
        self._latest.append(record)
        log.debug("lookup: %s", record)

    def json(self) -> list[Json]:
        """The latest first."""
        return list(self._latest)[::-1]
