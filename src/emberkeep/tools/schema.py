"""From a function's signature to the JSON schema of its arguments, and from arguments to values.

signature and docstring -> fields -> pydantic's model -> schema without references, reader of arguments
"""

from __future__ import annotations

import inspect
import json
import re
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import PydanticJsonSchemaWarning

from emberkeep.errors import ConfigError, ToolFailed
from emberkeep.text import did_you_mean
from emberkeep.types.events import Caller
from emberkeep.types.request import Json
from emberkeep.values import dataclass

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
    """The parameter that takes the user it runs for."""


def read_signature(function: Callable[..., Any], name: str | None = None) -> Signature:
    """`name`: another one than the function's own. Raises ConfigError, with what has to be changed."""
    name = name or str(getattr(function, "__name__", type(function).__name__))
    if not inspect.isroutine(function):
        raise ConfigError(f"{name} is no function or method: only those can be tools.")
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} cannot be a tool's name: use up to 64 letters, digits, _ and -.")
    description, about = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(f"The tool {name} has no docstring: say in it what the tool does, for the model.")
    fields, caller = _fields(function, name, about)
    return Signature(name, description, *_schema(name, fields), caller)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What it says of the function, and of each parameter: in Google's, NumPy's or Sphinx's form."""
    try:
        parsed = docstring_parser.parse(text)
    except (docstring_parser.ParseError, IndexError):  # it is in no form at all
        return _in_one_line(text), {}
    about = {param.arg_name: _in_one_line(param.description or "") for param in parsed.params}
    return _in_one_line(parsed.description or ""), {name: said for name, said in about.items() if said}


def _in_one_line(text: str) -> str:
    """Line breaks are tokens that tell a model nothing."""
    return " ".join(text.split())


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
        metadata = getattr(hint, "__metadata__", ())
        # First: what a type says of itself counts for more.
        hint = typing.Annotated[_bare(hint), Field(description=description), *metadata]
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
            schema = _inline(model.model_json_schema())
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
            wrong = _explain(error, names)
            raise ToolFailed(f"The arguments of {model.__name__} do not fit: {wrong}.") from error
        return {name: getattr(checked, f"p{number}") for number, name in enumerate(names)}

    return arguments


def _takes_null(schema: Mapping[str, Json]) -> bool:
    if not {"type", "anyOf", "oneOf", "$ref", "enum", "const"} & set(schema):
        return True
    options = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return any(one.get("type") == "null" or None in one.get("enum", ()) for one in options)


# ── what is wrong with arguments, said so that a model can correct them ──

_SHOWN = 5
"""Most faults that are named: a model that is told of more corrects fewer."""


def _explain(error: ValidationError, known: Sequence[str]) -> str:
    """`known`: the names of all parameters."""
    found = error.errors(include_url=False)
    faults = [_fault(fault, known) for fault in found[:_SHOWN]]
    more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
    return f"{'; '.join(faults)}{more}"


def _fault(fault: Any, known: Sequence[str]) -> str:
    place = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
        hint = did_you_mean(place, known, f"it takes {', '.join(known) or 'nothing'}")
        return f"there is no {place} ({hint})"
    if fault["type"] == "missing":
        return f"{place} is missing"
    return f"{place or 'they'}: {fault['msg']}"


# ── schemas as models like them ──
# Without the titles that pydantic makes of names, which are tokens that tell nothing, and without references,
# which small models do not follow. What refers to itself stays one.

_VALUES = ("default", "const", "enum", "examples", "required")
"""What is in them is no schema."""
_DEFS = "#/$defs/"
_REFERENCE = re.compile(rf'"\$ref": "{re.escape(_DEFS)}([^"]+)"')


def _inline(schema: Mapping[str, Json]) -> dict[str, Json]:
    """A copy of a schema that pydantic made, without references."""
    return _Inliner(schema.get("$defs", {})).whole(_without(schema, "$defs"))


class _Inliner:
    def __init__(self, shared: Mapping[str, Json]) -> None:
        self._shared = shared
        self._left: dict[str, Json] = {}

    def whole(self, schema: Mapping[str, Json]) -> dict[str, Json]:
        found = self._object(schema)
        return {**found, "$defs": self._left} if self._left else found

    def _any(self, part: Json) -> Json:
        if isinstance(part, list):
            return [self._any(item) for item in part]
        return self._object(part) if isinstance(part, dict) else part

    def _object(self, part: Mapping[str, Json]) -> dict[str, Json]:
        if "$ref" in part:
            name = part["$ref"].removeprefix(_DEFS)
            return {**self._resolve(name), **self._object(_without(part, "$ref"))}
        # OpenAPI's `discriminator` tells which reference is which.
        kept = _without(part, "title", "discriminator")
        return {key: self._inner(key, value) for key, value in kept.items()}

    def _inner(self, key: str, value: Json) -> Json:
        if key in _VALUES:
            return value
        if key == "properties":  # its keys are names, which may be any word
            return {name: self._any(one) for name, one in value.items()}
        return self._any(value)

    def _resolve(self, name: str) -> dict[str, Json]:
        if not self._is_recursive(name):
            return self._object(self._shared[name])
        if name not in self._left:
            self._left[name] = {}
            self._left[name] = self._object(self._shared[name])
        return {"$ref": f"{_DEFS}{name}"}

    def _is_recursive(self, name: str) -> bool:
        seen: set[str] = set()
        todo = [name]
        while todo:
            refers_to = set(_REFERENCE.findall(json.dumps(self._shared[todo.pop()])))
            todo += refers_to - seen
            seen |= refers_to
        return name in seen


def _without(part: Mapping[str, Json], *keys: str) -> dict[str, Json]:
    return cast(dict[str, Json], {name: value for name, value in part.items() if name not in keys})
