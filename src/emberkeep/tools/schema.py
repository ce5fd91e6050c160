"""From a function's signature to the JSON schema of its arguments, and from arguments to values."""

from __future__ import annotations

import inspect
import json
import re
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import PydanticJsonSchemaWarning

from emberkeep.errors import ConfigError, ToolFailed
from emberkeep.tools.docstrings import read_docstring
from emberkeep.tools.faults import faults
from emberkeep.tools.inlining import inlined
from emberkeep.types import Caller, Json

Arguments = Callable[[Mapping[str, Json]], dict[str, Any]]
"""Checks what a model gave, and makes the function's values of it. Raises ToolFailed."""

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What every vendor takes for a tool's name."""


@dataclass(frozen=True, slots=True)
class Signature:
    name: str
    description: str
    parameters: Mapping[str, Json]
    arguments: Arguments
    caller: str | None
    """The parameter that is for whom it runs."""


def read_signature(function: Callable[..., Any], name: str | None = None) -> Signature:
    """`name`: another one than the function's own. Raises ConfigError, with what has to be changed."""
    name = name or str(getattr(function, "__name__", type(function).__name__))
    if not inspect.isroutine(function):
        raise ConfigError(f"{name} is no function or method: only those can be tools.")
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} cannot be a tool's name: use up to 64 letters, digits, _ and -.")
    description, about = read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(f"The tool {name} has no docstring: say in it what the tool does, for the model.")
    fields, caller = _fields(function, name, about)
    return Signature(name, description, *_schema(name, fields), caller)


def _fields(
    function: Callable[..., Any], name: str, about: Mapping[str, str]
) -> tuple[dict[str, Any], str | None]:
    """A type and a default for each parameter, and the name of that which takes the caller."""
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
        fields[parameter.name] = _field(parameter, hint, about.get(parameter.name))
    return fields, caller


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"The tool {name} has a type that is not known: {error}.") from error


def _field(parameter: inspect.Parameter, hint: Any, description: str | None) -> tuple[Any, FieldInfo]:
    if description is not None:
        said = getattr(hint, "__metadata__", ())
        # First: what a type says of itself counts for more.
        hint = typing.Annotated[_bare(hint), Field(description=description), *said]
    # By alias: pydantic has names of its own, such as `schema` and `copy`, and refuses those that begin with _.
    if isinstance(parameter.default, FieldInfo):
        return typing.Annotated[hint, parameter.default], Field(alias=parameter.name)
    if parameter.default is parameter.empty:
        return hint, Field(alias=parameter.name)
    return hint, Field(parameter.default, alias=parameter.name)


def _bare(hint: Any) -> Any:
    return hint.__origin__ if typing.get_origin(hint) is typing.Annotated else hint


def _schema(name: str, fields: Mapping[str, Any]) -> tuple[Mapping[str, Json], Arguments]:
    """Raises ConfigError."""
    # Models invent arguments: they are told, and try again.
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    numbered: dict[str, Any] = {f"p{number}": field for number, field in enumerate(fields.values())}
    try:
        model = create_model(name, __config__=config, **numbered)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PydanticJsonSchemaWarning)
            schema = inlined(model.model_json_schema())
        json.dumps(schema, allow_nan=False)
    except (
        PydanticUserError,
        PydanticUndefinedAnnotation,
        PydanticJsonSchemaWarning,
        TypeError,
        ValueError,
    ) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(f"The tool {name} has a parameter that JSON cannot say: {reason}.") from error
    return schema, _reader(model, tuple(fields), schema)


def _reader(model: type[BaseModel], names: tuple[str, ...], schema: Mapping[str, Json]) -> Arguments:
    has_default = set(names) - set(schema.get("required", ()))
    left_out = {name for name in has_default if not _takes_null(schema["properties"][name])}

    def arguments(given: Mapping[str, Json]) -> dict[str, Any]:
        # Models write null for what they leave out.
        meant = {key: value for key, value in given.items() if value is not None or key not in left_out}
        try:
            checked = model.model_validate(meant)
        except ValidationError as error:
            wrong = faults(error, names)
            raise ToolFailed(f"The arguments of {model.__name__} do not fit: {wrong}.") from error
        return {name: getattr(checked, f"p{number}") for number, name in enumerate(names)}

    return arguments


def _takes_null(schema: Mapping[str, Json]) -> bool:
    if not {"type", "anyOf", "oneOf", "$ref", "enum", "const"} & set(schema):
        return True
    options = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return any(one.get("type") == "null" or None in one.get("enum", ()) for one in options)
