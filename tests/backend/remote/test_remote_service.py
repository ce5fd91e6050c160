"""When a service is asked again."""

from __future__ import annotations

from email.utils import formatdate
from time import time

import pytest

from emberkeep.backend.remote.service import retry_after


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after-ms": "1500", "retry-after": "7"}, 1.5),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": formatdate(0, usegmt=True)}, 0),
        ({}, None),
    ],
)
def test_when_to_come_back_is_read_from_headers(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_a_date_to_come_back_at_is_in_the_future() -> None:
    wait = retry_after({"retry-after": formatdate(time() + 3600, usegmt=True)})
    assert wait is not None and 3000 < wait <= 3600
