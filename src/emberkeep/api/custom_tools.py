"""OpenAI's custom tools, which take a text: to the model each is a function with one argument."""

from __future__ import annotations

import json

from emberkeep.types import Json

CUSTOM_PARAMETERS: dict[str, Json] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_arguments(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The inverse, as far as the arguments are such JSON; otherwise all of them are the text."""
    try:
        given = json.loads(arguments)["input"]
    except (ValueError, LookupError, TypeError):
        return arguments
    return given if isinstance(given, str) else arguments
