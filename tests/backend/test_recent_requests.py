"""The figures of the latest lookups show no text, and nothing of who was forgotten."""

from __future__ import annotations

import logging
from time import monotonic

import pytest

from emberkeep.backend.recent_requests import ForgottenUsers, RecentLookups
from emberkeep.kv.forgetting import of_user
from emberkeep.types.events import Divergence, LookupRecord, MissReason
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Request

ANN, BOB = (Request(user=user, namespace=private_namespace(user)) for user in ("ann", "bob"))


def test_no_text_of_a_request_is_shown() -> None:
    lookups = RecentLookups()
    divergence = Divergence(7, "a secret that was stored", "a secret that was asked", "tool secret_tool")
    lookups.add(ANN, LookupRecord(prompt_tokens=9, reason=MissReason.DIVERGED, divergence=divergence))
    (shown,) = lookups.json()
    assert "secret" not in str(shown)
    assert shown["divergence"] == {"token_index": 7} and shown["reason"] == "diverged"


def test_the_log_tells_what_was_reused_from_where_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    divergence = Divergence(7, "a secret that was stored", "a secret that was asked", "message 3 (user)")
    lookup = LookupRecord(9, warm_tokens=3, cold_tokens=4, reason=MissReason.DIVERGED, divergence=divergence)
    with caplog.at_level(logging.DEBUG, "emberkeep.backend"):
        RecentLookups().add(ANN, lookup)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "of 9 tokens reused: 3 warm, 4 cold; 0.0 ms to load; why no more: diverged at token 7 in message 3 (user)"
    )


def test_who_was_forgotten_is_not_shown_any_more() -> None:
    lookups = RecentLookups()
    for request in (ANN, BOB, ANN):
        lookups.add(request, LookupRecord())
    lookups.forget(of_user("ann"))
    assert [shown["user"] for shown in lookups.json()] == ["bob"]


def test_only_requests_that_came_before_are_forgotten_with_their_user() -> None:
    forgotten = ForgottenUsers()
    before = monotonic()
    forgotten.add(of_user("ann"))
    assert forgotten.since(before, f"~8~{ANN.namespace}")
    assert not forgotten.since(before, BOB.namespace)
    assert not forgotten.since(monotonic() + 1, ANN.namespace)
    for _ in range(300):
        forgotten.add(of_user("a user"))
    assert forgotten.since(before, BOB.namespace)
