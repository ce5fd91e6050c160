"""Clients that do not send back what they got: reasoning stripped, calls written anew, ids of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.types.events import ReasoningDelta
from emberkeep.types.memory import NoteKind
from emberkeep.types.request import Json, Message, ReasoningFormat, Request, Tool, ToolCall
from helpers.conversing import GREEDY, Answer, Harbour, ScriptedEngine

# As many templates do: reasoning is written for what follows the latest question, and left out before it.
THINKING = (
    "{%- set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FERRY = Tool("ferry", "When the ferry leaves.", {"type": "object"})
TURNS = 4
NEW = 40
"""More tokens than a tool's result has, with what the template writes around it."""


def says(number: int) -> str:
    return (
        f"<think>\nThey want number {number}, so I look it up in the big book.\n</think>\n\n"
        f'<tool_call>\n{{"name": "ferry", "arguments": {{"pier": {number}, "at": "noon"}}}}\n</tool_call>'
    )


def in_order(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))


class Agent:
    """Calls a tool in each turn, and sends back what it got in its own words."""

    def __init__(self, harbour: Harbour, *, strips: bool = True, ids: Callable[[str], str] = str, **fields: Json):
        self._harbour, self._strips, self._ids, self._fields = harbour, strips, ids, fields
        question = Message("user", "When does the ferry leave?")
        self.messages = [Message("system", "You keep the books of a harbour. " * 8), question]

    def turn(self, number: int, text: str | None = None) -> Answer:
        assert isinstance(self._harbour.engine, ScriptedEngine)
        self._harbour.engine.will_say(text or says(number))
        answer = self._harbour.ask(self.request())
        reasoning = "".join(event.text for event in answer.events if isinstance(event, ReasoningDelta))
        calls = tuple(ToolCall(self._ids(call.id), call.name, in_order(call.arguments)) for call in answer.calls)
        self.messages.append(Message("assistant", answer.text, "" if self._strips else reasoning, calls))
        self.messages += [Message("tool", f"At {number} o'clock.", tool_call_id=call.id) for call in calls]
        return answer

    def request(self) -> Request:
        messages = tuple(self.messages)
        return Request(messages=messages, tools=(FERRY,), sampling=GREEDY, max_tokens=200, **self._fields)


def open_harbour(folder: Path, template: str = THINKING, **config: Json) -> Harbour:
    return Harbour(folder, ScriptedEngine(context=4096), template=template, **{"recall": "off", **config})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"strips": False},
        {"ids": lambda id: f"mine-{id[-4:]}"},
        {"conversation_id": "ferries"},
        {"reasoning": ReasoningFormat.STRIP},
    ],
    ids=["stripped", "reformatted only", "renamed", "named", "never shown"],
)
def test_a_loop_of_calls_goes_on_from_stored_state(tmp_path, fields):
    with open_harbour(tmp_path) as harbour:
        agent = Agent(harbour, **fields)
        turns = [agent.turn(number) for number in range(TURNS)]
        assert [turn.completed.timings.prompt_n < NEW for turn in turns] == [False, True, True, True]
        unscripted = harbour.ask(replace(agent.request(), max_tokens=4))
        assert unscripted.completed.timings.prompt_n < NEW
        assert unscripted.ids == harbour.fresh(unscripted, max_tokens=4)


def test_what_is_restored_is_what_the_model_wrote_to_the_token(tmp_path):
    with open_harbour(tmp_path) as harbour:
        agent = Agent(harbour)
        agent.turn(0)
        assert "<|im_start|>assistant\n" + says(0) + "<|im_end|>" in agent.turn(1).prompt


def test_a_template_that_leaves_reasoning_out_still_does(tmp_path):
    with open_harbour(tmp_path) as harbour:
        agent = Agent(harbour)
        agent.turn(0)
        agent.turn(1, "<think>\nEasy.\n</think>\n\nAt noon.")
        agent.messages.append(Message("user", "And tomorrow?"))
        assert "<think>" not in agent.turn(2).prompt


def test_a_template_that_knows_no_reasoning_is_given_none(tmp_path):
    with open_harbour(tmp_path, THINKING.replace("m.reasoning_content and", "false and")) as harbour:
        agent = Agent(harbour)
        agent.turn(0)
        assert "<think>" not in agent.turn(1).prompt


def test_after_a_restart_the_prompt_is_still_the_same(tmp_path):
    with open_harbour(tmp_path, disk_budget=1 << 30) as harbour:
        agent = Agent(harbour)
        for number in range(TURNS):
            before = agent.turn(number)
    with open_harbour(tmp_path, disk_budget=1 << 30) as harbour:
        agent._harbour = harbour
        after = agent.turn(TURNS)
        # The latest answer had not come back yet, so nothing was noted of it.
        assert after.prompt.startswith(before.prompt)
        assert after.completed.usage.cached_tokens >= before.completed.usage.prompt_tokens


def test_reasoning_that_a_client_does_send_is_its_own(tmp_path):
    with open_harbour(tmp_path) as harbour:
        agent = Agent(harbour)
        agent.turn(0)
        sent = agent.messages[2]
        agent.messages[2] = Message("assistant", sent.content, "I was told so.", sent.tool_calls)
        assert "<think>\nI was told so.\n</think>" in agent.turn(1).prompt


def test_an_answer_that_was_edited_is_not_restored(tmp_path):
    with open_harbour(tmp_path) as harbour:
        agent = Agent(harbour)
        agent.turn(0)
        call = ToolCall(agent.messages[2].tool_calls[0].id, "ferry", '{"pier": 7}')
        agent.messages[2] = Message("assistant", tool_calls=(call,))
        prompt = agent.turn(1).prompt
        assert '{"pier": 7}' in prompt and "<think>" not in prompt


def test_users_do_not_get_each_others_answers(tmp_path):
    with open_harbour(tmp_path) as harbour:
        agent = Agent(harbour, namespace="alice")
        agent.turn(0)
        agent._fields["namespace"] = "bob"
        assert "<think>" not in agent.turn(1).prompt


def test_who_was_forgotten_has_no_answers_left(tmp_path):
    with open_harbour(tmp_path) as harbour:
        agent = Agent(harbour)
        agent.turn(0)
        harbour.backend.cache.remove_user("")
        assert "<think>" not in agent.turn(1).prompt


def test_a_dry_run_notes_nothing(tmp_path):
    with open_harbour(tmp_path) as harbour:
        agent = Agent(harbour)
        agent.turn(0)
        told = harbour.backend.cache.explain(agent.request())
        assert told.lookup.prompt_tokens - told.lookup.reused_tokens < NEW
        assert not [row for row in harbour.memory.export("") if row["kind"] == "note"]
        agent.turn(1)
        (note,) = [row for row in harbour.memory.export("") if row["kind"] == "note"]
        assert note["about"] == NoteKind.WRITTEN
