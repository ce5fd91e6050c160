"""Clients whose prompts change with every call: what is noticed, what is said, and what rules save."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.backend.local import LocalBackend
from emberkeep.chat.messages import RequestPart
from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.session.hygiene import Volatility
from emberkeep.types.events import Completed, MissReason
from emberkeep.types.hygiene import TIMESTAMPS, TOOL_ORDER, HygieneAction, HygieneRule
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Message, Request, Sampling, Tool
from helpers.conversing import TEMPLATE
from helpers.scripted_backend import end_of, fake_backend, read_events, settle

DUTIES = " ".join(f"Duty {word}: look after it, and say what you did." for word in "abcdefgh")
HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};\n"
SHUFFLED = HygieneRule(TOOL_ORDER.name, action=HygieneAction.OFF)

Open = Callable[..., LocalBackend]


@pytest.fixture
def open_backend(tmp_path: Path) -> Iterator[Open]:
    opened = []

    def open_one(*rules: HygieneRule) -> LocalBackend:
        config = Config(data_dir=tmp_path, hygiene=rules, disk_budget=0)
        opened.append(fake_backend(config, FakeEngine(context=4096, cells=1 << 15), template=TEMPLATE))
        return opened[-1]

    yield open_one
    for backend in opened:
        asyncio.run(backend.close())


def ask(backend: LocalBackend, request: Request) -> Completed:
    _, completed = end_of(read_events(backend, request))
    settle(backend)
    return completed


def chat(system: str, *said: Message, tools: tuple[Tool, ...] = (), user: str = "") -> Request:
    return Request(
        messages=(Message("system", system), *(said or (Message("user", "What is left to do?"),))),
        tools=tools,
        sampling=Sampling(temperature=0),
        max_tokens=2,
        user=user,
        namespace=private_namespace(user),
    )


def at(time: str) -> str:
    return f"It is {time}.\n{DUTIES}"


def test_a_header_that_changes_with_every_call_costs_nothing(open_backend):
    backend = open_backend()
    ask(backend, chat(HEADER.format("fa690") + DUTIES))
    second = ask(backend, chat(HEADER.format("65abc") + DUTIES))
    assert second.timings.prompt_n == 1
    assert second.hygiene == ("billing-header",)


def test_a_time_that_costs_reuse_is_named_with_the_rule_that_would_mend_it(open_backend):
    backend = open_backend()
    ask(backend, chat(at("10:05")))
    request = chat(at("10:06"))
    told = backend.cache.explain(request)
    assert told.lookup.reason is MissReason.VOLATILE
    assert "Message 1 (system) differs from an earlier request only in a date or a time" in told.sentence
    assert '[[hygiene]] name = "timestamps" in emberkeep.toml' in told.sentence
    lookup = ask(backend, request).lookup
    assert lookup.reason is MissReason.VOLATILE
    assert lookup.divergence is not None
    assert lookup.divergence.volatile == ("timestamps",)
    assert lookup.divergence.where == "message 1 (system)"


def test_the_log_has_one_line_for_each_client_and_kind(open_backend, caplog):
    backend = open_backend()
    for user in ("alice", "bob"):
        for minute in range(5):
            ask(backend, chat(at(f"10:0{minute}"), user=user))
    lines = [record.message for record in caplog.records if record.name == "emberkeep.hygiene"]
    assert len(lines) == 2
    assert lines[0].startswith("requests of the user alice differ in message 1 (system) only in a date or a time")


@pytest.mark.parametrize("later", ["alice", "bob"])
def test_nobody_is_compared_with_another_user_or_with_one_who_was_forgotten(open_backend, later):
    backend = open_backend()
    ask(backend, chat(at("10:05"), user="alice"))
    if later == "alice":
        backend.cache.remove_user("alice")
    ask(backend, chat("It is fine.", user=later))
    assert ask(backend, chat(at("10:06"), user=later)).lookup.reason is MissReason.EDITED


def test_a_prompt_that_was_really_edited_is_called_edited(open_backend):
    backend = open_backend()
    ask(backend, chat(at("10:05")))
    assert ask(backend, chat(at("noon"))).lookup.reason is MissReason.EDITED


def test_an_id_in_the_users_first_message_is_noticed(open_backend):
    backend = open_backend()
    for session in ("3f2504e0-4f89-11d3-9a0c-0305e82c3301", "5b1a04e0-4f89-41d3-9a0c-0305e82c3302"):
        said = [Message("user", f"Session {session}. {DUTIES}"), Message("assistant", "x"), Message("user", "Go.")]
        lookup = ask(backend, chat("You are kind.", *said)).lookup
    assert lookup.divergence is not None
    assert (lookup.divergence.where, lookup.divergence.volatile) == ("message 2 (user)", ("ids",))


def test_a_number_has_no_rule_of_its_own(open_backend):
    backend = open_backend()
    ask(backend, chat(f"Call 1 of many.\n{DUTIES}"))
    told = backend.cache.explain(chat(f"Call 2 of many.\n{DUTIES}"))
    assert told.lookup.divergence is not None
    assert told.lookup.divergence.volatile == ("numbers",)
    assert "A [[hygiene]] rule with a pattern for that line" in told.sentence


@pytest.mark.parametrize(("word", "value"), [("numbers", "5"), ("ids", "run_1a2b3c"), ("timestamps", "10:05")])
def test_a_word_that_is_the_name_of_a_kind_is_no_value(open_backend, word, value):
    backend = open_backend()
    ask(backend, chat(f"Add the {word} below.\n{DUTIES}"))
    lookup = ask(backend, chat(f"Add the {value} below.\n{DUTIES}")).lookup
    assert lookup.reason is MissReason.EDITED


def test_an_answer_does_not_fail_with_the_search_for_what_it_cost(open_backend, monkeypatch, caplog):
    def fail(self: Volatility, request: Request, place: RequestPart) -> tuple[str, ...]:
        raise ValueError("a mistake")

    monkeypatch.setattr(Volatility, "compare", fail)
    backend = open_backend()
    ask(backend, chat(at("10:05")))
    assert ask(backend, chat(at("10:06"))).lookup.reason is MissReason.DIVERGED
    assert "where a prompt left what was stored was not found" in caplog.text


def test_a_random_order_of_tools_costs_nothing(open_backend):
    backend = open_backend()
    tools = tuple(Tool(f"tool_{i}") for i in range(5))
    ask(backend, chat(DUTIES, tools=tools))
    second = ask(backend, chat(DUTIES, tools=tools[::-1]))
    assert second.timings.prompt_n == 1
    assert second.hygiene == ("tool-order",)


def test_a_random_order_of_tools_is_noticed_where_its_rule_is_off(open_backend):
    backend = open_backend(SHUFFLED)
    tools = tuple(Tool(f"tool_{i}") for i in range(5))
    ask(backend, chat(DUTIES, tools=tools))
    told = backend.cache.explain(chat(DUTIES, tools=tools[::-1]))
    assert told.lookup.reason is MissReason.VOLATILE
    assert "only in the order of its tools" in told.sentence
    assert '[[hygiene]] name = "tool-order" in emberkeep.toml keeps the first one.' in told.sentence


def test_a_moved_time_leaves_system_prompt_and_history_reusable(open_backend):
    backend = open_backend(TIMESTAMPS)
    said: list[Message] = []
    evaluated = []
    for minute in range(4):
        said.append(Message("user", f"Question number {minute}: {'what now? ' * 8}"))
        completed = ask(backend, chat(at(f"10:0{minute}"), *said))
        evaluated.append(completed.timings.prompt_n)
        said.append(Message("assistant", "ok"))
    assert completed.hygiene == ("timestamps",)
    # The time of the turn before stood at its end: what follows is evaluated again, and nothing else.
    assert max(evaluated[1:]) < 150 < evaluated[0]


def test_what_is_warmed_has_no_header_either(open_backend):
    backend = open_backend()
    prefix = replace(chat(HEADER.format("fa690") + DUTIES), max_tokens=0).decided(is_prefix=True)
    prefix = replace(prefix, messages=prefix.messages[:1])
    ask(backend, prefix)
    assert ask(backend, chat(HEADER.format("65abc") + DUTIES)).usage.cached_tokens > 300
