"""Memory over HTTP: what it is told, and how its contents look in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from emberkeep.errors import InvalidField
from emberkeep.library.fields import Remembered
from emberkeep.library.messages import message_json
from emberkeep.server.wire.fields import UserFields
from emberkeep.types import Fact, Forgotten, Json, Recollection, SavedConversation


class FactBody(UserFields):
    value: Remembered


class AnswerBody(UserFields):
    question: Remembered
    answer: Remembered


def one_owner(body: UserFields, query: UserFields) -> str:
    """Whoever writes may be named in either. Raises InvalidField where that makes two."""
    told, asked = body.to_namespace(), query.to_namespace()
    if told and asked and told != asked:
        raise InvalidField("user_id", "the query and the body name different users: name one.")
    return told or asked


# ── answers ──


def found_json(found: Sequence[Recollection]) -> dict[str, Json]:
    return {"object": "list", "data": [_recollection_json(one) for one in found]}


def _recollection_json(found: Recollection) -> dict[str, Json]:
    """Without the key, which names a place to us and to nobody else."""
    told = {name: value for name, value in asdict(found).items() if name != "key"}
    return {**told, "conversation": found.conversation or None}


def fact_json(fact: Fact) -> dict[str, Json]:
    return {"object": "memory.fact", **asdict(fact)}


def answer_json(answer_id: int) -> dict[str, Json]:
    return {"object": "memory.answer", "id": answer_id}


def conversations_json(conversations: Sequence[SavedConversation]) -> dict[str, Json]:
    return {"object": "list", "data": [_head_json(conversation) for conversation in conversations]}


def conversation_json(conversation: SavedConversation) -> dict[str, Json]:
    return {**_head_json(conversation), "messages": [message_json(message) for message in conversation.messages]}


def _head_json(conversation: SavedConversation) -> dict[str, Json]:
    return {
        "id": conversation.id,
        "object": "memory.conversation",
        "title": conversation.title,
        "model": conversation.model,
        "created": conversation.created,
        "updated": conversation.updated,
        "message_count": conversation.message_count,
    }


def stats_json(stats: Mapping[str, Json]) -> dict[str, Json]:
    """Without the size of the file, which tells about others."""
    return {key: value for key, value in stats.items() if key not in ("bytes", "limit")}


def forgotten_json(forgotten: Forgotten) -> dict[str, Json]:
    return {"object": "memory.removed", "removed": asdict(forgotten)}
