"""Tools as OpenAI's APIs write them: functions, and custom tools, which take a text.

To the model a custom tool is a function with one argument.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from emberkeep.api.body import Body
from emberkeep.api.errors import TOOL_NAME
from emberkeep.api.fields import Schema
from emberkeep.errors import InvalidField
from emberkeep.types.request import Json, Tool, ToolCall, ToolChoice

ToolName = Annotated[str, Field(pattern=TOOL_NAME)]


class FunctionFields(Body):
    name: ToolName
    description: str | None = None
    parameters: Schema | None = None

    def to_tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {})


def _any_text(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "text":
        raise ValueError("a custom tool takes any text here: leave the grammar of its input out")
    return form


class CustomFields(Body):
    name: ToolName
    description: str | None = None
    format: Annotated[dict[str, Any], AfterValidator(_any_text)] | None = None

    def to_tool(self) -> Tool:
        return Tool(self.name, self.description or "", _CUSTOM_PARAMETERS)


def check_choice(choice: ToolChoice, tools: tuple[Tool, ...]) -> None:
    """Raises InvalidField for what is not among the tools."""
    if choice.mode == "required" and not (tools and choice.allowed != ()):
        raise InvalidField("tool_choice", "required needs at least one tool: give tools.")
    named = {choice.name} if choice.mode == "named" else set(choice.allowed or ())
    if not named <= {tool.name for tool in tools}:
        raise InvalidField("tool_choice", "names a function that is not among the tools.")


def call_json(call: ToolCall) -> dict[str, Json]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


# ── the text of a custom tool, and the arguments that the model writes ──

_CUSTOM_PARAMETERS: dict[str, Json] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_BEGUN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LONGEST_ESCAPE = 12
"""A pair of surrogates."""


def custom_arguments(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The inverse, also of arguments that were cut; what is no such JSON is the text itself."""
    try:
        text = json.loads(arguments)["input"]
    except (ValueError, LookupError, TypeError):
        return _cut_input(arguments)
    return text if isinstance(text, str) else arguments


def _cut_input(arguments: str) -> str:
    begun = _BEGUN.match(arguments)
    if begun is None:
        return arguments
    text = arguments[begun.end() :]
    for length in range(len(text), max(len(text) - _LONGEST_ESCAPE, -1), -1):
        try:
            return str(json.loads(f'"{text[:length]}"', strict=False))
        except ValueError:  # it ends in the middle of an escape
            continue
    return arguments
