"""Requests that every replica gets, and what becomes of their answers: one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from emberkeep.cluster.keys import ReplicaAnswer
from emberkeep.types.request import Json


class Merge(Enum):
    """How the answers of all replicas become one."""

    HEALTH = "health"
    """Well, while one of them is."""
    EACH = "each"
    """A list of all, each with its replica."""
    METRICS = "metrics"
    """Every figure with the label `replica`."""
    LISTS = "lists"
    """One list of the entries of all lists, each with its replica."""
    SUM = "sum"
    """Numbers are added up; that one could not do it is said."""
    ANY = "any"
    """The first that went well: one of them has what it is about, or all have done it. A response that is being
    written is known to its replica alone."""


_RULES: Sequence[tuple[str, str, Merge]] = (
    ("GET", r"(/v1)?/health", Merge.HEALTH),
    ("GET", r"/v1/stats", Merge.EACH),
    ("GET", r"/v1/cache/tree", Merge.EACH),
    ("GET", r"/slots", Merge.EACH),
    ("GET", r"/metrics", Merge.METRICS),
    ("GET", r"/v1/cache|/v1/requests", Merge.LISTS),
    ("GET", r"/v1/cache/[^/]+", Merge.ANY),
    ("GET", r"(/v1)?/responses/[^/]+(/input_items)?", Merge.ANY),
    ("DELETE", r"(/v1)?/responses/[^/]+", Merge.ANY),
    ("POST", r"(/v1)?/responses/[^/]+/cancel", Merge.ANY),
    ("DELETE", r"/v1/cache(/[^/]+)?|/v1/memory", Merge.SUM),
    ("POST", r"/v1/cache/gc", Merge.SUM),
    ("POST", r"/v1/cache/(pin|unpin|verify)|/v1/warm|/v1/tools/decisions", Merge.ANY),
    ("POST", r"/models/(load|unload)|/lora-adapters|/props|/expert-tracking", Merge.ANY),
)


def merge_for(method: str, path: str) -> Merge | None:
    """None: one replica answers it."""
    asked, path = "GET" if method == "HEAD" else method, path.rstrip("/")
    return next((merge for verb, rule, merge in _RULES if verb == asked and re.fullmatch(rule, path)), None)


def merged(merge: Merge, answers: Sequence[ReplicaAnswer]) -> ReplicaAnswer:
    """One answer out of one or more."""
    match merge:
        case Merge.HEALTH:
            return _health(answers)
        case Merge.METRICS:
            return _metrics(answers)
        case Merge.ANY:
            return _best(answers)
    done = [(answer.replica, json.loads(answer.body)) for answer in answers if _went_well(answer)]
    failed = [answer for answer in answers if not _went_well(answer) and answer.status != 404]
    if not done or (merge is Merge.SUM and failed):
        return _best(failed or answers)
    if merge is Merge.EACH:
        return _whole({"object": "list", "replicas": [{"replica": name, "data": told} for name, told in done]})
    if merge is Merge.LISTS:
        return _whole(_one_list(done))
    return _whole(_sum([told for _, told in done]))


def _went_well(answer: ReplicaAnswer) -> bool:
    return answer.status < 300


def _best(answers: Sequence[ReplicaAnswer]) -> ReplicaAnswer:
    """What went well, else the refusal that says most: that something is not there is said by those that do not
    have it."""
    return min(answers, key=lambda answer: (not _went_well(answer), answer.status == 404, answer.status))


def _health(answers: Sequence[ReplicaAnswer]) -> ReplicaAnswer:
    told = {answer.replica: json.loads(answer.body) for answer in answers}
    well = [name for name, health in told.items() if health.get("status") == "ok"]
    status = "failed" if not well else "ok" if len(well) == len(told) else "degraded"
    connected = any(health.get("backend_connected") for health in told.values())
    return _whole({"status": status, "backend_connected": connected, "replicas": told}, 200 if well else 503)


def _one_list(done: Sequence[tuple[str, Mapping[str, Json]]]) -> dict[str, Json]:
    entries = [{**entry, "replica": name} for name, told in done for entry in told["data"]]
    merged = {**done[0][1], "data": entries, "has_more": any(told["has_more"] for _, told in done)}
    totals = [told["totals"] for _, told in done if "totals" in told]
    return {**merged, "totals": _sum(totals)} if totals else merged


def _sum(values: Sequence[Any]) -> Json:
    """The sum of numbers, or of objects that are alike, field by field."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _sum([value[key] for value in values if key in value]) for key in first}
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return sum(value for value in values if isinstance(value, (int, float)))
    return first


class _Collected(Collector):
    """Metrics that were written before, with a label more."""

    def __init__(self, answers: Sequence[ReplicaAnswer]) -> None:
        self._answers = answers

    def collect(self) -> list[Metric]:
        families: dict[str, Metric] = {}
        for answer in self._answers:
            for family in text_string_to_metric_families(answer.body.decode()):
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                known.samples += [_labelled(sample, answer.replica) for sample in family.samples]
        return list(families.values())


def _labelled(sample: Sample, replica: str) -> Sample:
    return sample._replace(labels={"replica": replica, **sample.labels})


def _metrics(answers: Sequence[ReplicaAnswer]) -> ReplicaAnswer:
    done = [answer for answer in answers if _went_well(answer)]
    if not done:
        return _best(answers)
    registry = CollectorRegistry()
    registry.register(_Collected(done))
    return ReplicaAnswer("", 200, done[0].headers, generate_latest(registry))


def _whole(told: Json, status: int = 200) -> ReplicaAnswer:
    return ReplicaAnswer("", status, ((b"content-type", b"application/json"),), json.dumps(told).encode())
