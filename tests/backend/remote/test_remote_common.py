"""What all vendors share: how failures are said, what is kept for them, what is taken from a request."""

from __future__ import annotations

import base64
from email.utils import formatdate
from time import time

import pytest

from emberkeep.backend.remote.asking import Keepsakes, arguments_of, chosen, inline
from emberkeep.backend.remote.failing import Service, retry_after
from emberkeep.types import Image, Json, Sampling

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


def test_only_the_latest_are_kept() -> None:
    kept: Keepsakes[int] = Keepsakes(most=2)
    kept.keep("a", 1)
    kept.keep("b", 2)
    assert kept.get("a") == 1
    kept.keep("c", 3)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (1, None, 3)


def test_only_what_somebody_has_chosen_is_sent() -> None:
    assert chosen(Sampling()) == {}
    assert chosen(Sampling(temperature=0, seed=0)) == {"temperature": 0, "seed": 0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", {}), ('{"a": 1}', {"a": 1}), ("[1]", {"arguments": [1]}), ("{oops", {"arguments": "{oops"})],
)
def test_arguments_are_always_an_object(text: str, expected: Json) -> None:
    assert arguments_of(text) == expected


@pytest.mark.parametrize(
    ("url", "kind", "data"),
    [
        ("data:image/webp;base64,cG5n", "image/webp", b"png"),
        ("data:image/svg+xml;charset=utf-8,%3Csvg%2F%3E", "image/svg+xml", b"<svg/>"),
        ("data:;base64,cG5n", "image/png", b"png"),
    ],
)
def test_a_data_address_is_the_image_itself(url: str, kind: str, data: bytes) -> None:
    found = inline(Image(url))
    assert found is not None
    assert (found.media_type, base64.b64decode(found.base64)) == (kind, data)
    assert inline(Image("https://example.org/a.png")) is None
