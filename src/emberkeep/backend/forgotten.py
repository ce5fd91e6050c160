"""Who was forgotten while a request of theirs was under way: it is answered, and leaves nothing behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from time import monotonic

_REMEMBERED = 256


class ForgottenUsers:
    """Safe to use from any thread."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, Container[str]]] = deque(maxlen=_REMEMBERED)

    def add(self, owners: Container[str]) -> None:
        self._latest.append((monotonic(), owners))

    def since(self, arrived: float, owner: str) -> bool:
        """Whether its user was forgotten after a request had `arrived`; also where nobody can tell any more."""
        known = list(self._latest)
        if len(known) == _REMEMBERED and known[0][0] > arrived:
            return True
        return any(at >= arrived and owner in owners for at, owners in known)
