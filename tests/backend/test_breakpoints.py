"""Where a client says that the beginning of its prompt will come again: what is counted, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.api.answer import usage_json
from emberkeep.api.openai_chat import ChatBody
from emberkeep.backend.local import LocalBackend
from emberkeep.config.settings import Config
from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.types.cache import EntryKind
from emberkeep.types.events import Completed, Marked, Progress
from emberkeep.types.request import Breakpoint, Message, Request, Sampling, Tool, Ttl
from helpers.scripted_backend import end_of, fake_backend, read_events, settle
from helpers.waiting import eventually

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RULES, DATE = "You are the secretary of a small harbour.\n", "Today is Monday."
CHAT = Request(
    messages=(
        Message("system", RULES + DATE),
        Message("user", "Which ships wait at the third pier?"),
        Message("assistant", "A schooner since Monday."),
        Message("user", "Here is a list.\nWhat do they pay?"),
    ),
    tools=(Tool("get_weather", "The weather of a city.", {"type": "object"}),),
    sampling=Sampling(temperature=0),
    max_tokens=2,
)

Open = Callable[[KvUnit], LocalBackend]


@pytest.fixture
def open_backend(tmp_path: Path) -> Iterator[Open]:
    opened: list[LocalBackend] = []

    def open_one(unit: KvUnit) -> LocalBackend:
        engine = FakeEngine(cells=1 << 14, kv_unit=unit)
        opened.append(fake_backend(Config(data_dir=tmp_path), engine, template=TEMPLATE))
        return opened[-1]

    yield open_one
    for backend in opened:
        asyncio.run(backend.close())


@pytest.fixture
def backend(open_backend: Open) -> LocalBackend:
    return open_backend(KvUnit.RANGE)


def ask(backend: LocalBackend, *breakpoints: Breakpoint, **changes: object) -> Completed:
    _, completed = end_of(read_events(backend, replace(CHAT, breakpoints=breakpoints, **changes)))
    settle(backend)
    return completed


def before(backend: LocalBackend, part: str) -> int:
    """Tokens of the prompt up to the end of `part`."""
    text = backend.tokenizer.apply_template(CHAT.messages, CHAT.tools)
    end = text.index(part) + len(part)
    return len(backend.tokenizer.tokenize(text[:end], add_special=False, parse_special=True))


@pytest.mark.parametrize(
    ("breakpoint", "part"),
    [
        (Breakpoint(1, chars=len(RULES)), RULES),
        (Breakpoint(2), "third pier?<|im_end|>\n"),
        (Breakpoint(3), "since Monday.<|im_end|>\n"),
        (Breakpoint(4, chars=15), "Here is a list."),
    ],
)
def test_tokens_before_a_breakpoint_are_counted(backend: LocalBackend, breakpoint: Breakpoint, part: str) -> None:
    assert abs(ask(backend, breakpoint).usage.marked.tokens - before(backend, part)) <= 1


@pytest.mark.parametrize("breakpoint", [Breakpoint(0), Breakpoint(1)], ids=["tools", "system"])
def test_tools_and_system_end_with_the_stable_beginning(backend: LocalBackend, breakpoint: Breakpoint) -> None:
    marked = ask(backend, breakpoint).usage.marked.tokens
    assert marked >= before(backend, DATE)
    assert marked <= before(backend, "<|im_start|>user\n")


def test_the_last_one_counts_and_the_last_one_for_longer(backend: LocalBackend) -> None:
    marked = ask(backend, Breakpoint(1, ttl=Ttl.LONG), Breakpoint(2, ttl=Ttl.LONG), Breakpoint(4)).usage.marked
    assert marked.long_tokens == before(backend, "third pier?<|im_end|>\n")
    assert marked.tokens == before(backend, "they pay?<|im_end|>\n")


def test_without_any_nothing_is_counted(backend: LocalBackend) -> None:
    assert ask(backend).usage.marked == Marked()


def test_progress_tells_it_too(backend: LocalBackend) -> None:
    request = replace(CHAT, breakpoints=(Breakpoint(4),), want_progress=True)
    events = read_events(backend, request)
    told = [event.marked for event in events if isinstance(event, Progress)]
    assert set(told) <= {Marked(), end_of(events)[1].usage.marked}


def test_a_stable_beginning_is_kept_for_as_long_as_it_is_marked(backend: LocalBackend) -> None:
    def ttls(*breakpoints: Breakpoint) -> set[Ttl]:
        ask(backend, *breakpoints)
        return {entry.ttl for entry in backend.cache.entries() if entry.kind is EntryKind.PREFIX}

    # It is found out beside the answer, which may be there first.
    assert eventually(lambda: ttls() == {Ttl.SHORT})
    assert ttls(Breakpoint(4, ttl=Ttl.LONG)) == {Ttl.SHORT}
    assert eventually(lambda: ttls(Breakpoint(0, ttl=Ttl.LONG), Breakpoint(4)) == {Ttl.LONG})


def test_state_that_cannot_be_cut_is_stored_at_a_breakpoint(open_backend: Open) -> None:
    backend = open_backend(KvUnit.SNAPSHOT)
    marked = ask(backend, Breakpoint(4, chars=15)).usage.marked.tokens
    other = replace(CHAT.messages[-1], content="Here is a list.\nWho owns them?")
    again = ask(backend, messages=(*CHAT.messages[:-1], other))
    assert again.usage.cached_tokens == marked > before(backend, "since Monday.<|im_end|>\n")


def test_the_same_prompt_without_a_breakpoint_has_no_state_there(open_backend: Open) -> None:
    backend = open_backend(KvUnit.SNAPSHOT)
    ask(backend)
    other = replace(CHAT.messages[-1], content="Here is a list.\nWho owns them?")
    again = ask(backend, messages=(*CHAT.messages[:-1], other))
    assert again.usage.cached_tokens <= before(backend, "since Monday.<|im_end|>\n")


@pytest.mark.parametrize("mark", [{"stable": True}, {"cache_control": {"type": "ephemeral"}}])
@pytest.mark.parametrize("unit", [KvUnit.RANGE, KvUnit.SNAPSHOT])
def test_clients_of_openais_apis_mark_and_count_the_same(
    open_backend: Open, unit: KvUnit, mark: dict[str, object]
) -> None:
    """Another question after the same marked part goes on from there, also where state cannot be cut."""
    backend = open_backend(unit)
    document = "The ships that wait at the third pier. " * 12

    def asked(question: str) -> dict[str, object]:
        parts = [{"type": "text", "text": document, **mark}, {"type": "text", "text": question}]
        return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, "temperature": 0}

    def told(question: str) -> tuple[int, int]:
        body = ChatBody.model_validate(asked(question))
        _, completed = end_of(read_events(backend, body.to_request().decided(from_store=True)))
        settle(backend)
        details = usage_json(completed.usage)["prompt_tokens_details"]
        return details["cached_tokens"], details["cache_write_tokens"]

    cached, written = told("What do they pay?")
    assert cached == 0 < written
    again, rewritten = told("Since when?")
    assert again >= written - 1
    assert rewritten <= 1
