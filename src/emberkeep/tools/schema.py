"""From a function's signature to the JSON schema of its arguments, and from arguments to values."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, Field, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from emberkeep.errors import ConfigError
from emberkeep.types import Caller, Json

Arguments = Callable[[Mapping[str, Json]], dict[str, Any]]
"""Checks what a model gave, and makes the function's values of it. Raises pydantic's ValidationError."""

_SECTION = re.compile(r"\n\s*(Args|Arguments|Parameters):\s*\n", re.IGNORECASE)
_OTHER_SECTION = re.compile(r"\n\s*(Returns?|Raises|Yields|Examples?):\s*\n.*", re.IGNORECASE | re.DOTALL)
_ENTRY = re.compile(r"^(\s+)(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")


@dataclass(frozen=True, slots=True)
class Signature:
    name: str
    description: str
    parameters: Mapping[str, Json]
    arguments: Arguments
    caller: str | None
    """The parameter that is for whom it runs."""


def read_signature(function: Callable[..., Any]) -> Signature:
    """Raises ConfigError, with what has to be changed."""
    name = getattr(function, "__name__", "")
    description, about = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(f"The tool {name} has no docstring: say in it what the tool does, for the model.")
    hints = _hints(function, name)
    fields: dict[str, Any] = {}
    caller = None
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"The tool {name} takes {parameter}: give each of its parameters a name.")
        if hint is None:
            raise ConfigError(f"The tool {name} does not say what {parameter.name} is: give it a type.")
        if hint is Caller:
            caller = parameter.name
            continue
        fields[parameter.name] = (_described(hint, about.get(parameter.name)), _default(parameter))
    return Signature(name, description, *_schema(name, fields), caller)


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"The tool {name} has a type that is not known: {error}.") from error


def _default(parameter: inspect.Parameter) -> Any:
    return ... if parameter.default is parameter.empty else parameter.default


def _described(hint: Any, description: str | None) -> Any:
    return hint if description is None else typing.Annotated[hint, Field(description=description)]


def _schema(name: str, fields: dict[str, Any]) -> tuple[Mapping[str, Json], Arguments]:
    try:
        # Models invent arguments: they are told, and try again.
        model = create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
        schema = model.model_json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(f"The tool {name} has a parameter that JSON cannot say: {reason}.") from error

    def arguments(given: Mapping[str, Json]) -> dict[str, Any]:
        checked = model.model_validate(given)
        return {key: getattr(checked, key) for key in fields}

    return _untitled(schema), arguments


def _untitled(schema: Json) -> Json:
    """Without the titles that pydantic makes of names: every one of them would be tokens."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    return {key: _untitled(value) for key, value in kept.items()}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What it says in all, and about each parameter (Google's `Args:`)."""
    head, *rest = _SECTION.split(f"\n{text}", maxsplit=1)
    description = _OTHER_SECTION.sub("", head).strip()
    about: dict[str, str] = {}
    last = ""
    for line in _OTHER_SECTION.sub("", rest[1]).splitlines() if rest else ():
        if entry := _ENTRY.match(line):
            last = entry[2]
            about[last] = entry[3].strip()
        elif last and line.strip():
            about[last] += f" {line.strip()}"
    return re.sub(r"\s*\n\s*", " ", description), about
