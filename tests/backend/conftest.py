from __future__ import annotations

from collections.abc import Callable

import pytest

from emberkeep.backend import fallback


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time passes for a chain of backends when it is told to."""
    now = [1000.0]
    monkeypatch.setattr(fallback, "monotonic", lambda: now[0])

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward
