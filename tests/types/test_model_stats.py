"""What is told of drafts."""

from __future__ import annotations

import json

from emberkeep.types.models import LENGTH_BUCKETS, DraftSource, SourceStats, SpeculationStats


def test_acceptance_is_the_share_of_what_was_drafted() -> None:
    assert SourceStats(drafts=2, drafted_tokens=8, accepted_tokens=6).acceptance == 0.75


def test_a_source_that_drafted_nothing_has_no_acceptance() -> None:
    assert SourceStats().acceptance == 0.0
    assert SourceStats().accepted_lengths == (0,) * LENGTH_BUCKETS


def test_the_json_of_sources_stands_under_their_names() -> None:
    lengths = (1, 0, 2, *[0] * (LENGTH_BUCKETS - 3))
    stats = SpeculationStats(
        True, "", 3, 8, 4, {DraftSource.CONTEXT: SourceStats(3, 8, 4, lengths), DraftSource.PATH: SourceStats()}
    )
    told = json.loads(json.dumps(stats.json()))
    assert told["sources"]["context"] == {
        "drafts": 3,
        "drafted_tokens": 8,
        "accepted_tokens": 4,
        "acceptance": 0.5,
        "accepted_lengths": list(lengths),
    }
    assert list(told["sources"]) == ["context", "path"]
    assert (told["enabled"], told["reason"], told["steps"]) == (True, None, 3)


def test_what_does_not_speculate_says_why() -> None:
    assert SpeculationStats(False, "It is switched off.").json()["reason"] == "It is switched off."
