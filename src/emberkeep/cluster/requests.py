"""What the gateway passes on, and to whom: to one replica, by user, conversation and how its prompt begins, or to
every one, whose answers become one.

Bodies are not checked here: what is wrong with one, the replica says that gets it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from hashlib import blake2b
from typing import Any
from urllib.parse import parse_qsl, unquote

import xxhash
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from emberkeep.api.anthropic_messages import user_of_metadata
from emberkeep.api.body import parse_object, validate
from emberkeep.api.fields import UserFields
from emberkeep.errors import RequestError
from emberkeep.routing import RouteKeys
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Json
from emberkeep.values import dataclass

BLOCK_BYTES = 512
"""So much of a prompt is about a chunk of stored state."""
_MOST_BLOCKS = 2048
"""Beyond a megabyte, what follows makes no difference to where a request goes."""
_PROMPT_FIELDS = (
    *("tools", "functions", "system", "instructions"),
    *("messages", "prompt", "input", "input_extra", "input_prefix", "input_suffix"),
)
"""In the order in which templates write them."""
_VOLATILE = frozenset({"cache_control", "stable", "id", "status"})
"""Keys of messages and items that change from turn to turn, though the prompt does not."""
_ANSWERS = re.compile(
    r"(/v1)?/(chat/completions|completions|responses|messages|embeddings|rerank|reranking)"
    r"|/(completion|infill|embedding|reranking)|/api/(chat|generate|embed|embeddings)"
)
"""Paths of what a model answers, and users are limited in."""
_NAMED = re.compile(r"(?:/v1)?/(?:responses|conversations)/([^/]+)")
"""Paths that name a response or a conversation."""


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """One HTTP request, whole."""

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    raw_path: bytes = b""
    server: tuple[str, int | None] | None = None
    """The address that the client has dialled."""


@dataclass(frozen=True, slots=True)
class Route:
    user: str
    """Whose request it is; empty where it names nobody."""
    owner: str
    """The namespace of what is stored for them."""
    keys: RouteKeys
    is_answer: bool
    """A model answers it, so that it may be asked again where it was lost."""


def route_of(asked: ReplicaRequest) -> Route:
    """Pure."""
    path = asked.path.rstrip("/")
    query = _query(asked.query)
    fields = {**query, **_fields(asked)}
    user, session = _whose(path, fields)
    owner = private_namespace(user, _text(fields.get("cache_salt")))
    is_answer = asked.method == "POST" and _ANSWERS.fullmatch(path) is not None
    named = _NAMED.fullmatch(path.removesuffix("/cancel").removesuffix("/input_items"))
    conversation = unquote(named[1]) if named else _conversation(fields) or session
    model = _text(fields.get("model"))
    beginnings = hash_chain(prompt_text(fields), f"{model}\n{owner}")
    keys = RouteKeys(conversation_key(owner, conversation), beginnings, _text(query.get("replica")))
    return Route(user, owner, keys, is_answer)


def conversation_key(owner: str, conversation: str) -> str:
    """No two owners' conversations have the same. As short for a long name as for any."""
    named = json.dumps([owner, conversation]).encode()
    return blake2b(named, digest_size=16).hexdigest() if conversation else ""


def hash_chain(text: Iterable[bytes], seed: str) -> tuple[int, ...]:
    """One hash for each whole block, of all text up to its end."""
    value, rest, chain = xxhash.xxh3_64_intdigest(seed.encode()), b"", []
    for part in text:
        rest += part
        whole = len(rest) - len(rest) % BLOCK_BYTES
        for begin in range(0, whole, BLOCK_BYTES):
            value = xxhash.xxh3_64_intdigest(rest[begin : begin + BLOCK_BYTES], seed=value)
            chain.append(value)
            if len(chain) == _MOST_BLOCKS:
                return tuple(chain)
        rest = rest[whole:]
    return tuple(chain)


def prompt_text(fields: Mapping[str, Json]) -> Iterator[bytes]:
    """What becomes the prompt, so that equal prompts have equal texts however a client writes them, and one that
    goes on begins with the text of the one before."""
    for name in _PROMPT_FIELDS:
        value = fields.get(name)
        if value is None or value == []:
            continue
        yield f"{name}\n".encode()
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            yield _normal(part)


def _normal(part: Json) -> bytes:
    if isinstance(part, str):
        return part.encode()
    return json.dumps(_plain(part), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _plain(value: Json) -> Json:
    """Without what is empty or does not reach the prompt; a text in one block is a text."""
    if isinstance(value, Mapping):
        kept = {
            key: _plain(inner)
            for key, inner in value.items()
            if key not in _VOLATILE and inner is not None and inner != []
        }
        return kept["text"] if set(kept) == {"type", "text"} else kept
    if isinstance(value, Sequence) and not isinstance(value, str):
        listed = [_plain(inner) for inner in value]
        return listed[0] if len(listed) == 1 and isinstance(listed[0], str) else listed
    return value


def _fields(asked: ReplicaRequest) -> Mapping[str, Json]:
    """Empty where the body is no object."""
    if asked.method not in ("POST", "PUT") or not asked.body:
        return {}
    try:
        return parse_object(asked.body)
    except RequestError:
        return {}


def _query(query: bytes) -> dict[str, Json]:
    return dict(parse_qsl(query.decode("latin-1")))


def _whose(path: str, fields: Mapping[str, Json]) -> tuple[str, str]:
    """The user, as the server finds it, and the session that an agent of Anthropic's names."""
    try:
        user = validate(UserFields, fields).to_user()
    except RequestError:
        return "", ""
    metadata = fields.get("metadata")
    if not path.endswith("/messages") or not isinstance(metadata, Mapping):
        return user, ""
    named, session = user_of_metadata(_text(metadata.get("user_id")))
    return user or named, session


def _conversation(fields: Mapping[str, Json]) -> str:
    named = fields.get("conversation")
    known = (
        fields.get("conversation_id"),
        named.get("id") if isinstance(named, Mapping) else named,
        fields.get("previous_response_id"),
        fields.get("prompt_cache_key"),
    )
    return next((name for name in known if isinstance(name, str) and name), "")


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def names_replica(asked: ReplicaRequest) -> bool:
    """Whether one replica alone is asked, and not whoever knows."""
    return "replica" in _query(asked.query)


def forgotten_user(asked: ReplicaRequest) -> str | None:
    """Whose stored state a request removes; None where it does something else."""
    if asked.method != "DELETE" or asked.path.rstrip("/") != "/v1/cache":
        return None
    return dict(parse_qsl(asked.query.decode("latin-1"), keep_blank_values=True)).get("user_id")


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


# ── what replicas answer the gateway with ──
@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Messages of an answer, and the replica that gives it."""

    replica: str
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """An answer that was waited for."""

    replica: str
    """Its name, which people and metrics know it by; empty where it is the answer of several."""
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


# ── requests that every replica gets, and what becomes of their answers: one ──


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
        return _whole({"object": "list", "replicas": [{"replica": name, "data": value} for name, value in done]})
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
    healths = {answer.replica: json.loads(answer.body) for answer in answers}
    well = [name for name, health in healths.items() if health.get("status") == "ok"]
    status = "failed" if not well else "ok" if len(well) == len(healths) else "degraded"
    connected = any(health.get("backend_connected") for health in healths.values())
    return _whole({"status": status, "backend_connected": connected, "replicas": healths}, 200 if well else 503)


def _one_list(done: Sequence[tuple[str, Mapping[str, Json]]]) -> dict[str, Json]:
    entries = [{**entry, "replica": name} for name, listing in done for entry in listing["data"]]
    merged = {**done[0][1], "data": entries, "has_more": any(listing["has_more"] for _, listing in done)}
    totals = [listing["totals"] for _, listing in done if "totals" in listing]
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


def _whole(content: Json, status: int = 200) -> ReplicaAnswer:
    return ReplicaAnswer("", status, ((b"content-type", b"application/json"),), json.dumps(content).encode())
