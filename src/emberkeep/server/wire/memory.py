"""Memory over HTTP: what it is told, and how its contents look in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from emberkeep.api.messages import message_json
from emberkeep.api.request import Remembered, UserFields
from emberkeep.errors import InvalidField
from emberkeep.types import Fact, Forgotten, Json, SavedConversation


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
