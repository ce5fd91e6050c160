"""Why a prompt was not reused, in a sentence, for the person who runs the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.backend.local import LocalBackend
from emberkeep.chat.template import ask_worker
from emberkeep.config.settings import Config
from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import Overloaded
from emberkeep.types.events import Completed, MissReason
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Message, Request, Sampling, Tool
from helpers.scripted_backend import end_of, fake_backend, read_events, settle

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = Tool("get_weather", "The weather of a city, today and tomorrow.", {"type": "object"})
TIME = Tool("get_time", "The time of day in a city.", {"type": "object"})
CHAT = Request(
    messages=(
        Message("system", "You are the secretary of a small harbour where ships of many kinds wait."),
        Message("user", "Which ships wait at the third pier, and how long have they been waiting there?"),
        Message("assistant", "Two of them: a schooner since Monday, and a brig since this morning."),
        Message("user", "And what do they pay?"),
    ),
    tools=(WEATHER, TIME),
    sampling=Sampling(temperature=0),
    max_tokens=2,
    conversation_id="harbour",
)


def open_backend(folder: Path, weights: str = "fake", unit: KvUnit = KvUnit.RANGE) -> LocalBackend:
    engine = FakeEngine(cells=1 << 15, weights=weights, kv_unit=unit)
    return fake_backend(Config(data_dir=folder), engine, template=TEMPLATE, name=weights)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    backend = open_backend(tmp_path)
    yield backend
    asyncio.run(backend.close())


def ask(backend: LocalBackend, request: Request) -> Completed:
    _, completed = end_of(read_events(backend, request))
    settle(backend)
    return completed


def edited(index: int, text: str) -> Request:
    messages = list(CHAT.messages)
    messages[index] = replace(messages[index], content=text)
    return replace(CHAT, messages=tuple(messages))


FOURTH = edited(1, "Which ships wait at the fourth pier, and how long?")
CHANGED = replace(CHAT, tools=(WEATHER, replace(TIME, description="The time in a city, with seconds.")))


@pytest.mark.parametrize(
    ("request_", "reason", "where", "sentence"),
    [
        (CHAT, MissReason.NONE, None, "All "),
        (FOURTH, MissReason.EDITED, "message 2 (user)", "Message 2 (user) was edited"),
        (CHANGED, MissReason.TOOLS, "the tool get_time", "The tool get_time was changed"),
        (edited(3, "Who is it?"), MissReason.DIVERGED, "message 4 (user)", "Message 4 (user) goes on differently"),
    ],
    ids=["all", "edited", "tools", "a new question is no edit"],
)
def test_the_place_is_named_and_the_response_says_the_same(backend, request_, reason, where, sentence):
    ask(backend, CHAT)
    told = backend.cache.explain(request_)
    answered = ask(backend, request_).lookup
    for lookup in (told.lookup, answered):
        assert lookup.reason is reason
        assert (lookup.divergence and lookup.divergence.where) == where
    assert sentence in told.sentence


def test_both_texts_are_quoted(backend):
    ask(backend, CHAT)
    divergence = backend.cache.explain(FOURTH).lookup.divergence
    assert divergence.stored_text.strip().startswith("third")
    assert divergence.prompt_text.strip().startswith("fourth")


def test_an_answer_does_without_an_explanation_that_cannot_be_rendered_now(backend, monkeypatch):
    ask(backend, CHAT)

    def busy(wanted, source, values, seconds):
        if not values["add_generation_prompt"]:
            raise Overloaded("There is no process for it.")
        return ask_worker(wanted, source, values, seconds)

    monkeypatch.setattr("emberkeep.chat.template.ask_worker", busy)
    answer = ask(backend, FOURTH)
    assert answer.usage.completion_tokens == 2
    assert answer.lookup.divergence is not None
    assert not answer.lookup.divergence.where


def test_the_expired_entry_is_named(backend):
    ask(backend, CHAT)
    backend._store._ledger.clock._offset += 4000
    backend.cache.gc()
    told = backend.cache.explain(CHAT)
    assert told.lookup.reason is MissReason.EXPIRED
    assert "outlived its TTL" in told.sentence


def test_the_other_user_is_named_here_and_never_in_a_response(backend):
    ask(backend, replace(CHAT, user="alice", namespace=private_namespace("alice")))
    as_bob = replace(CHAT, user="bob", namespace=private_namespace("bob"))
    told = backend.cache.explain(as_bob)
    assert told.lookup.reason is MissReason.OTHER_USER
    assert "the user alice" in told.sentence
    lookup = ask(backend, as_bob).lookup
    assert (lookup.reason, lookup.reused_tokens, lookup.divergence) == (MissReason.NEW, 0, None)


def test_the_other_model_is_named(tmp_path):
    first = open_backend(tmp_path, "first-model")
    ask(first, CHAT)
    asyncio.run(first.close())
    second = open_backend(tmp_path, "second-model")
    told = second.cache.explain(CHAT)
    unrelated = second.cache.explain(edited(0, "You are a poet."))
    asyncio.run(second.close())
    assert told.lookup.reason is MissReason.OTHER_MODEL
    assert "first-model" in told.sentence
    assert unrelated.lookup.reason is MissReason.NEW


def test_looking_changes_nothing(backend):
    ask(backend, CHAT)
    before = backend.cache.entries()[0]
    for _ in range(3):
        backend.cache.explain(CHAT)
    after = backend.cache.entries()[0]
    assert (after.hits, after.turns) == (before.hits, before.turns)


def test_a_model_that_needs_snapshots_says_so(tmp_path):
    backend = open_backend(tmp_path, unit=KvUnit.BOTH)
    ask(backend, replace(CHAT, max_tokens=40))
    told = backend.cache.explain(CHAT)
    asyncio.run(backend.close())
    assert told.lookup.reason is MissReason.NO_SNAPSHOT
    assert 0 < told.lookup.reused_tokens < told.lookup.prompt_tokens - 1
