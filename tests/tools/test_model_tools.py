"""Other models as tools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from emberkeep.errors import RemoteDown
from emberkeep.runtime.consultants import Consulted, ModelTools
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import Caller, ToolOutcome
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Request, ToolCall

QWEN = RemoteModel("qwen", "compatible", "qwen2.5-coder", max_tokens=50, description="Good at code")
CLAUDE = RemoteModel("claude", "anthropic")


class Consultants:
    """Says what was asked; a model that is down fails."""

    def __init__(self, down: Sequence[str] = (), text: str = "No.") -> None:
        self.asked: list[tuple[str, Request]] = []
        self._down = down
        self._text = text

    async def __call__(self, remote: RemoteModel, request: Request) -> Consulted:
        self.asked.append((remote.name, request))
        if remote.name in self._down:
            raise RemoteDown(f"{remote.name} cannot be reached: try again later.")
        return Consulted(self._text, remote.model or "claude-sonnet-5-5", 1200, 34, 1500.0)


def box(consultants: Consultants) -> ToolBox:
    return ToolBox(ModelTools([QWEN, CLAUDE], consultants).functions(), ToolPolicy())


def call(toolbox: ToolBox, name: str, arguments: str, caller: Caller | None = None) -> ToolOutcome:
    return asyncio.run(toolbox.run(ToolCall("1", name, arguments), caller or Caller()))


def test_each_model_is_a_tool_that_says_what_it_is_good_at() -> None:
    functions = ModelTools([QWEN, CLAUDE], Consultants()).functions()
    assert [function.name for function in functions] == ["ask_qwen", "ask_claude"]
    assert {function.group for function in functions} == {"models"}
    assert not any(function.is_dangerous for function in functions)
    assert all(function.runs_beside for function in functions)
    described = functions[0].definition
    assert "qwen2.5-coder" in described.description and "Good at code." in described.description
    assert set(described.parameters["properties"]) == {"question", "context"}
    assert described.parameters["required"] == ["question"]


def test_an_answer_says_whose_it_is_and_what_it_took() -> None:
    outcome = call(box(Consultants()), "ask_qwen", '{"question": "Is P = NP?"}')
    assert (outcome.text, outcome.failed) == ("qwen says: No.", False)
    assert outcome.remark == "qwen (qwen2.5-coder), 1,200 + 34 tokens, 1.5 s"


def test_the_question_comes_after_what_it_needs_to_know() -> None:
    consultants = Consultants()
    call(box(consultants), "ask_qwen", '{"question": "Why?", "context": "It rains."}', Caller("alice"))
    name, request = consultants.asked[0]
    assert (name, request.messages[0].content, request.max_tokens) == ("qwen", "It rains.\n\nWhy?", 50)
    assert (request.user, request.namespace) == ("", "")  # nor is it told who asks


def test_a_model_that_is_asked_knows_how_many_models_passed_it_on() -> None:
    consultants = Consultants()
    call(box(consultants), "ask_qwen", '{"question": "Why?"}', Caller())
    assert consultants.asked[0][1].execution.depth == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_models_do_not_ask_each_other_forever(depth: int) -> None:
    consultants = Consultants()
    outcome = call(box(consultants), "ask_qwen", '{"question": "Why?"}', Caller(depth=depth))
    assert outcome.failed and "answer with what you know" in outcome.text
    assert consultants.asked == []


def test_a_model_that_fails_fails_alone() -> None:
    toolbox = box(Consultants(down=["qwen"]))
    failed = call(toolbox, "ask_qwen", '{"question": "Why?"}')
    assert failed.failed and "qwen cannot be reached" in failed.text
    assert call(toolbox, "ask_claude", '{"question": "Why?"}').text == "claude says: No."


def test_an_empty_answer_is_a_failure() -> None:
    assert call(box(Consultants(text=" ")), "ask_qwen", '{"question": "Why?"}').failed
