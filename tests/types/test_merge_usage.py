"""Several `Completed` as one: prompts of one HTTP request, or rounds of one answer."""

from __future__ import annotations

from emberkeep.types.events import (
    Completed,
    Eviction,
    Fit,
    LookupRecord,
    MissReason,
    Plan,
    Timings,
    Usage,
    merge_usage,
)

FIRST = Completed(
    Usage(100, 10, 60, 4, 6, 2),
    Timings(60, 40, 400.0, 10, 100.0, ttft_ms=50.0, queue_ms=5.0, draft_n=8, draft_n_accepted=6),
    LookupRecord(100, hot_tokens=60, reason=MissReason.NONE),
    Fit(Plan(512, 16), 1000, evictions=(Eviction(1, 5, 1),), recalled=1),
    "near",
)
SECOND = Completed(
    Usage(130, 20, 110, 1, 5, 4),
    Timings(110, 20, 200.0, 20, 300.0, ttft_ms=30.0, queue_ms=1.0, draft_n=9, draft_n_accepted=5),
    LookupRecord(130, warm_tokens=110, wide_tokens=7, reason=MissReason.EVICTED),
    Fit(Plan(256, 8), 2000, truncated_tokens=3, evictions=(Eviction(2, 9, 3),), recalled=2),
    "far",
)


def test_one_is_itself() -> None:
    assert merge_usage([FIRST]) is FIRST
    assert merge_usage([FIRST], are_rounds=True) is FIRST


def test_prompts_are_added_up() -> None:
    merged = merge_usage([FIRST, SECOND])
    assert merged.usage == Usage(230, 30, 170, 5, 11, 6)
    assert merged.timings == Timings(170, 60, 600.0, 30, 400.0, 30.0, 5.0, draft_n=17, draft_n_accepted=11)
    assert (merged.lookup.prompt_tokens, merged.lookup.hot_tokens, merged.lookup.warm_tokens) == (230, 60, 110)
    assert merged.lookup.reason is MissReason.EVICTED  # the first that missed something
    assert merged.fit == Fit(Plan(256, 8), 2000, 3, 0, (Eviction(1, 5, 1), Eviction(2, 9, 3)), 3)
    assert merged.answered_by == "near"


def test_of_rounds_the_last_prompt_counts_and_the_tokens_of_all() -> None:
    merged = merge_usage([FIRST, SECOND], are_rounds=True)
    assert merged.usage == Usage(130, 30, 110, 5, 11, 6)
    assert merged.timings == Timings(110, 20, 200.0, 30, 400.0, 50.0, 5.0, draft_n=17, draft_n_accepted=11)
    assert merged.lookup is SECOND.lookup
    assert merged.fit == Fit(Plan(256, 8), 2000, 3, 0, (Eviction(1, 5, 1), Eviction(2, 9, 3)), 2)
    assert merged.answered_by == "far"
