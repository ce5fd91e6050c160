"""What is told of drafts."""

from __future__ import annotations

import json

import pytest

from emberkeep.types.models import LENGTH_BUCKETS, DraftSource, SourceStats, SpeculationStats


def test_the_json_of_sources_stands_under_their_names() -> None:
    lengths = (1, 0, 2, *[0] * (LENGTH_BUCKETS - 3))
    sources = {DraftSource.CONTEXT: SourceStats(3, 8, 4, lengths), DraftSource.PATH: SourceStats()}
    stats = json.loads(json.dumps(SpeculationStats(True, "", 3, 8, 4, sources).json()))
    assert stats["sources"]["context"] == {
        "drafts": 3,
        "drafted_tokens": 8,
        "accepted_tokens": 4,
        "acceptance": 0.5,
        "accepted_lengths": list(lengths),
    }
    assert stats["sources"]["path"]["acceptance"] == 0.0  # nothing was drafted
    assert (stats["enabled"], stats["reason"], stats["steps"]) == (True, None, 3)


@pytest.mark.parametrize(("reason", "reported"), [("", None), ("It is switched off.", "It is switched off.")])
def test_what_does_not_speculate_says_why(reason: str, reported: str | None) -> None:
    assert SpeculationStats(not reason, reason).json()["reason"] == reported
