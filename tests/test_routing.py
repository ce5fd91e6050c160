from __future__ import annotations

import pytest

from emberkeep import routing
from emberkeep.routing import Affinity, Replica, RouteKeys


def replicas(*running: int, slots: int = 4) -> list[Replica]:
    return [Replica(name, count, slots) for name, count in zip("abcdefgh", running, strict=False)]


def best(router: Affinity, keys: RouteKeys, among: list[Replica]) -> str:
    return router.rank(keys, among)[0].id


def of(conversation: str = "", *beginnings: int) -> RouteKeys:
    return RouteKeys(conversation, beginnings)


# ── affinity ──


def test_a_conversation_goes_where_it_was_answered_last():
    router = Affinity()
    router.sent(of("talk"), "b")
    assert [best(router, of("talk"), replicas(0, 0, 0)) for _ in range(5)] == ["b"] * 5
    router.sent(of("talk"), "c")
    assert best(router, of("talk"), replicas(0, 0, 0)) == "c"


def test_asking_remembers_nothing():
    router = Affinity()
    chosen = [best(router, of("talk", 1), replicas(0, 0)) for _ in range(4)]
    assert sorted(chosen) == ["a", "a", "b", "b"]


def test_the_conversation_comes_before_the_beginning():
    router = Affinity()
    router.sent(of("talk", 1), "a")
    router.sent(of("other", 1, 2, 3), "b")
    assert best(router, of("talk", 1, 2, 3), replicas(0, 0, 0)) == "a"


def test_without_a_conversation_the_longest_known_beginning_decides():
    router = Affinity()
    router.sent(of("", 1, 2), "a")
    router.sent(of("", 1, 2, 3), "b")
    assert best(router, of("", 1, 2, 3, 4), replicas(0, 0, 0)) == "b"
    assert best(router, of("", 1, 2, 9, 9), replicas(1, 2, 0)) == "a"  # both know as much: the less busy one


def test_a_beginning_that_is_a_small_part_of_the_request_does_not_decide():
    router = Affinity()
    router.sent(of("", 1), "a")
    long, short = of("", 1, *range(100, 130)), of("", 1, 100, 101)
    assert best(router, long, replicas(1, 0)) == "b"
    assert best(router, short, replicas(1, 0)) == "a"


def test_what_is_known_of_nobody_goes_to_the_one_with_the_least_to_do():
    router = Affinity()
    assert best(router, of("new", 7), replicas(3, 1, 2)) == "b"


def test_least_to_do_is_by_slots():
    among = [Replica("small", 2, slots=2), Replica("large", 4, slots=16)]
    assert best(Affinity(), of(), among) == "large"


def test_those_that_are_equally_busy_take_turns():
    router = Affinity()
    assert [best(router, of(), replicas(1, 1, 1)) for _ in range(4)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("keys", [of("talk"), of("", 1, 2)])
def test_what_knows_a_request_is_followed_as_far_as_the_slack_goes(keys):
    router = Affinity()
    router.sent(keys, "a")
    assert best(router, keys, replicas(4, 0)) == "a"
    assert best(router, keys, replicas(5, 0)) == "b"
    assert best(router, keys, replicas(9, 6)) == "a"  # all are busy: only the difference counts


def test_those_that_are_too_busy_come_last_and_are_still_named():
    router = Affinity()
    router.sent(of("talk"), "a")
    assert [replica.id for replica in router.rank(of("talk"), replicas(40, 3, 2))] == ["c", "b", "a"]


def test_a_replica_that_gets_another_name_keeps_what_it_holds():
    router = Affinity()
    router.sent(of("talk", 1, 2), "new")
    router.sent(of("", 1), "b")
    router.renamed("new", "c")
    assert best(router, of("talk"), replicas(0, 0, 1)) == "c"
    assert best(router, of("", 1, 2), replicas(0, 0, 1)) == "c"
    assert best(router, of("", 1), replicas(0, 1, 1)) in ("b", "c")


def test_a_replica_that_is_not_among_those_to_choose_from_is_not_chosen():
    router = Affinity()
    router.sent(of("talk", 1), "z")
    assert best(router, of("talk", 1), replicas(1, 0)) == "b"


def test_where_there_are_none_none_is_named():
    assert Affinity().rank(of("talk", 1), []) == []


def test_only_the_latest_conversations_are_remembered(monkeypatch):
    monkeypatch.setattr(routing, "_MOST_CONVERSATIONS", 2)
    router = Affinity()
    for name in ("first", "second"):
        router.sent(of(name), "a")
    router.sent(of("first"), "a")  # used again: it is the second one that goes
    router.sent(of("third"), "a")
    followed = [name for name in ("first", "second", "third") if best(router, of(name), replicas(1, 0)) == "a"]
    assert followed == ["first", "third"]


def test_of_beginnings_the_shortest_are_remembered_longest(monkeypatch):
    monkeypatch.setattr(routing, "_MOST_BEGINNINGS", 3)
    router = Affinity()
    router.sent(of("", 1, 2, 3, 4), "a")
    assert best(router, of("", 1, 2, 3), replicas(1, 0)) == "a"
    router.sent(of("", 7, 8), "b")
    assert best(router, of("", 1, 5), replicas(1, 0)) == "a"
    assert best(router, of("", 7, 8), replicas(0, 1)) == "b"


# ── the others ──
