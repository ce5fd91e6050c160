"""How the failures of a service are said, and when it is asked again."""

from __future__ import annotations

from email.utils import formatdate
from time import time

import pytest

from emberkeep.backend.remote.service import Service, retry_after

KEY = "canary-7f3a9c"
SERVICE = Service("some-model", "some.example", "SOME_KEY", KEY)


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


@pytest.mark.parametrize("status", [302, 400, 401, 404, 413, 429, 500])
def test_a_failure_names_the_service_on_one_line_and_never_the_key(status: int) -> None:
    said = str(SERVICE.failure(status, f"Bad\nkey {KEY}" + "x" * 10_000))
    assert "some-model at some.example" in said and KEY not in said
    assert "\n" not in said and len(said) < 500
    assert KEY not in repr(SERVICE)
