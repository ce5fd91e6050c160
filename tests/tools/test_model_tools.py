"""Other models as tools."""

from __future__ import annotations

import asyncio

import pytest

from emberkeep.config.settings import Config
from emberkeep.errors import RemoteDown
from emberkeep.runtime.remote import Consultants
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import Caller, ToolOutcome
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Request, ToolCall
from helpers.scripted_backend import ScriptedBackend, answer

QWEN = RemoteModel("qwen", "compatible", "qwen2.5-coder", max_tokens=50, description="Good at code")
CLAUDE = RemoteModel("claude", "anthropic")


class Others:
    """Two models, of which the first one may be down."""

    def __init__(self, text: str = "No.", *, is_down: bool = False) -> None:
        self.asked: list[Request] = []
        self._text, self._is_down = text, is_down
        self.consultants = Consultants(Config(), [QWEN, CLAUDE], self._open)

    def _open(self, config: Config, remote: RemoteModel) -> ScriptedBackend:
        if self._is_down and remote is QWEN:
            raise RemoteDown("qwen cannot be reached: try again later.")
        return ScriptedBackend(self._answer)

    def _answer(self, request: Request) -> list[object]:
        self.asked.append(request)
        return answer(self._text, prompt_tokens=1200)

    def ask(self, name: str = "ask_qwen", caller: Caller | None = None, arguments: str = "{}") -> ToolOutcome:
        box = ToolBox(self.consultants.functions(), ToolPolicy())
        return asyncio.run(box.run(ToolCall("1", name, arguments), caller or Caller()))


WHY = '{"question": "Why?"}'


def test_each_model_is_a_tool_that_says_what_it_is_good_at() -> None:
    functions = Others().consultants.functions()
    assert [function.name for function in functions] == ["ask_qwen", "ask_claude"]
    assert {function.group for function in functions} == {"models"}
    assert not any(function.is_dangerous for function in functions)
    assert all(function.runs_beside for function in functions)
    described = functions[0].definition
    assert "qwen2.5-coder" in described.description and "Good at code." in described.description
    assert set(described.parameters["properties"]) == {"question", "context"}
    assert described.parameters["required"] == ["question"]


def test_an_answer_says_whose_it_is_and_what_it_took() -> None:
    outcome = Others().ask(arguments=WHY)
    assert (outcome.text, outcome.failed) == ("qwen says: No.", False)
    assert outcome.remark.startswith("qwen (scripted), 1,200 + 1 tokens, 0.")


def test_it_is_told_what_it_needs_to_know_and_not_who_asks() -> None:
    others = Others()
    others.ask("ask_qwen", Caller("alice"), '{"question": "Why?", "context": "It rains."}')
    (request,) = others.asked
    assert (request.messages[0].content, request.max_tokens) == ("It rains.\n\nWhy?", 50)
    assert (request.user, request.namespace, request.execution.depth) == ("", "", 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_models_do_not_ask_each_other_forever(depth: int) -> None:
    others = Others()
    outcome = others.ask(caller=Caller(depth=depth), arguments=WHY)
    assert outcome.failed and "answer with what you know" in outcome.text
    assert others.asked == []


def test_a_model_that_fails_fails_alone() -> None:
    others = Others(is_down=True)
    failed = others.ask(arguments=WHY)
    assert failed.failed and "qwen cannot be reached" in failed.text
    assert others.ask("ask_claude", arguments=WHY).text == "claude says: No."


def test_an_empty_answer_is_a_failure() -> None:
    assert Others(" ").ask(arguments=WHY).failed
