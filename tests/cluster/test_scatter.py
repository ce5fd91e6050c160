from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from emberkeep.cluster.keys import ReplicaAnswer
from emberkeep.cluster.scatter import Merge, merge_for, merged
from emberkeep.types.request import Json


def told(replica: str, value: Json, status: int = 200) -> ReplicaAnswer:
    return ReplicaAnswer(replica, status, (), json.dumps(value).encode())


def merge(how: Merge, *answers: ReplicaAnswer) -> tuple[int, Json]:
    one = merged(how, answers)
    return one.status, json.loads(one.body)


@pytest.mark.parametrize(
    ("method", "path", "how"),
    [
        ("GET", "/health", Merge.HEALTH),
        ("HEAD", "/v1/health/", Merge.HEALTH),
        ("GET", "/v1/stats", Merge.EACH),
        ("GET", "/metrics", Merge.METRICS),
        ("GET", "/v1/cache", Merge.LISTS),
        ("GET", "/v1/cache/abc", Merge.ANY),
        ("DELETE", "/v1/cache", Merge.SUM),
        ("DELETE", "/v1/cache/abc", Merge.SUM),
        ("DELETE", "/v1/memory", Merge.SUM),
        ("POST", "/models/load", Merge.ANY),
        ("POST", "/v1/cache/explain", None),
        ("GET", "/v1/responses/resp_1", Merge.ANY),
        ("POST", "/responses/resp_1/cancel", Merge.ANY),
        ("POST", "/v1/responses/input_tokens", None),
        ("GET", "/v1/models", None),
        ("POST", "/v1/chat/completions", None),
    ],
)
def test_what_every_replica_is_asked(method: str, path: str, how: Merge | None) -> None:
    assert merge_for(method, path) is how


@pytest.mark.parametrize(
    ("replicas", "status", "word"),
    [(("ok", "ok"), 200, "ok"), (("ok", "failed"), 200, "degraded"), (("draining", "failed"), 503, "failed")],
)
def test_a_cluster_is_well_while_one_replica_is(replicas: tuple[str, ...], status: int, word: str) -> None:
    answers = [told(str(n), {"status": one}, 200 if one == "ok" else 503) for n, one in enumerate(replicas)]
    got, health = merge(Merge.HEALTH, *answers)
    assert (got, health["status"]) == (status, word)
    assert set(health["replicas"]) == {"0", "1"}


def test_lists_become_one_whose_entries_say_where_they_are() -> None:
    pages = [
        told(n, {"data": [{"id": n * 3}], "has_more": n == "b", "totals": {"bytes": 5, "tokens": 1}}) for n in "ab"
    ]
    _, listed = merge(Merge.LISTS, *pages)
    assert listed["data"] == [{"id": "aaa", "replica": "a"}, {"id": "bbb", "replica": "b"}]
    assert listed["has_more"]
    assert listed["totals"] == {"bytes": 10, "tokens": 2}


def test_one_that_has_it_is_enough_and_a_real_failure_says_more_than_an_absence() -> None:
    absent, there, broken = told("0", {}, 404), told("1", {"id": 1}), told("2", {"error": 1}, 500)
    assert merge(Merge.ANY, absent, there, broken) == (200, {"id": 1})
    assert merge(Merge.SUM, absent, there) == (200, {"id": 1})
    assert merge(Merge.ANY, absent, broken) == (500, {"error": 1})
    assert merge(Merge.SUM, absent, absent)[0] == 404
    assert merge(Merge.SUM, absent, there, broken)[0] == 500
    assert merge(Merge.SUM, there, told("2", {"error": 1}, 429))[0] == 429


def test_metrics_have_the_label_of_their_replica_and_one_head_for_each_name() -> None:
    text = '# HELP a_total Some.\n# TYPE a_total counter\na_total{x="1"} 4\n'
    one = merged(Merge.METRICS, [ReplicaAnswer(n, 200, (), text.encode()) for n in ("0", "1")]).body.decode()
    assert one.count("# TYPE a_total") == 1
    (family,) = text_string_to_metric_families(one)
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"replica": "0", "x": "1"}, 4.0),
        ({"replica": "1", "x": "1"}, 4.0),
    ]
