"""Who was forgotten while a request of theirs was under way: it is answered, and leaves nothing behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from time import monotonic

from emberkeep.types import exact_namespace

_REMEMBERED = 256


class ForgottenUsers:
    """Safe to use from any thread."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, Container[str]]] = deque(maxlen=_REMEMBERED)

    def add(self, namespaces: Container[str]) -> None:
        self._latest.append((monotonic(), namespaces))

    def since(self, arrived: float, namespace: str) -> bool:
        """Whether its user was forgotten after a request had `arrived`; also where nobody can tell any more."""
        known = list(self._latest)
        if len(known) == _REMEMBERED and known[0][0] > arrived:
            return True
        owner = exact_namespace(namespace)
        return any(at >= arrived and owner in namespaces for at, namespaces in known)
