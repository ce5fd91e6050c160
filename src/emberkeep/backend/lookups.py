"""What the latest requests reused and why not more, for whoever looks at the figures."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container
from dataclasses import asdict

from emberkeep.types import Json, LookupRecord, Request

log = logging.getLogger("emberkeep.backend")

_REMEMBERED = 32


class RecentLookups:
    """Added to and read by any thread. Whoever looks may be somebody else: no text of a request is in it."""

    def __init__(self) -> None:
        self._latest: deque[tuple[str, dict[str, Json]]] = deque(maxlen=_REMEMBERED)

    def add(self, request: Request, lookup: LookupRecord) -> None:
        record = {
            "conversation_id": request.conversation_id,
            "user": request.user or None,
            "reused_tokens": lookup.reused_tokens,
            **asdict(lookup),
            "divergence": {"token_index": lookup.divergence.token_index} if lookup.divergence else None,
        }
        self._latest.append((request.namespace, record))
        log.debug("lookup: %s", record)

    def forget(self, owners: Container[str]) -> None:
        for latest in [latest for latest in list(self._latest) if latest[0] in owners]:
            self._latest.remove(latest)

    def json(self) -> list[Json]:
        """The latest first."""
        return [record for _, record in list(self._latest)][::-1]
