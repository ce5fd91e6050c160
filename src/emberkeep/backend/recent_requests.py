"""What is remembered of the latest requests: what each reused, and who was forgotten while it was under way."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container
from dataclasses import asdict, replace
from time import monotonic

from emberkeep.types.events import Divergence, LookupRecord
from emberkeep.types.request import Json, Request

log = logging.getLogger("emberkeep.backend")

_REMEMBERED_LOOKUPS = 32
_REMEMBERED_FORGETTINGS = 256


class RecentLookups:
    """What the latest requests reused and why not more, for the figures. Added to and read by any thread. An
    operator reads it, so no text of a request is in it."""

    def __init__(self) -> None:
        self._latest: deque[tuple[str, dict[str, Json], LookupRecord]] = deque(maxlen=_REMEMBERED_LOOKUPS)

    def add(self, request: Request, lookup: LookupRecord) -> None:
        whose: dict[str, Json] = {"conversation_id": request.conversation_id, "user": request.user or None}
        found = lookup.divergence and Divergence(lookup.divergence.token_index, "", "")  # without the texts
        self._latest.append((request.namespace, whose, replace(lookup, divergence=found) if found else lookup))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", _lookup_line(request, lookup))

    def forget(self, owners: Container[str]) -> None:
        for latest in [latest for latest in list(self._latest) if latest[0] in owners]:
            self._latest.remove(latest)

    def json(self) -> list[Json]:
        """The latest first."""
        return [_lookup_json(whose, lookup) for _, whose, lookup in list(self._latest)][::-1]


class ForgottenUsers:
    """Who was forgotten while a request of theirs was under way: it is answered, and leaves nothing behind. Safe
    to use from any thread."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, Container[str]]] = deque(maxlen=_REMEMBERED_FORGETTINGS)

    def add(self, owners: Container[str]) -> None:
        self._latest.append((monotonic(), owners))

    def since(self, arrived: float, owner: str) -> bool:
        """Whether an owner was forgotten after a request had `arrived`; also where that cannot be told any
        more."""
        known = list(self._latest)
        if len(known) == _REMEMBERED_FORGETTINGS and known[0][0] > arrived:
            return True
        return any(at >= arrived and owner in owners for at, owners in known)


def _lookup_json(whose: dict[str, Json], lookup: LookupRecord) -> dict[str, Json]:
    place = {"token_index": lookup.divergence.token_index} if lookup.divergence else None
    return {**whose, "reused_tokens": lookup.reused_tokens, **asdict(lookup), "divergence": place}


def _lookup_line(request: Request, lookup: LookupRecord) -> str:
    """For the log. No text of a message is in it."""
    whose = f" of conversation {request.conversation_id}" if request.conversation_id else ""
    tiers = {"hot": lookup.hot_tokens, "warm": lookup.warm_tokens, "cold": lookup.cold_tokens}
    tiers |= {"remote": lookup.remote_tokens, "moved": lookup.moved_tokens}
    found = ", ".join(f"{tokens} {tier}" for tier, tokens in tiers.items() if tokens) or "none"
    line = f"of {lookup.prompt_tokens} tokens{whose} reused: {found}; {lookup.load_ms:.1f} ms to load; "
    if (place := lookup.divergence) is None:
        return f"{line}why no more: {lookup.reason}"
    where = f" in {place.where}" if place.where else ""
    return f"{line}why no more: {lookup.reason} at token {place.token_index}{where}"
