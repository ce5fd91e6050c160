"""How the body of a request is read: JSON, with limits, into a model whose fields are checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import core_schema

from emberkeep.errors import InvalidField, RequestError
from emberkeep.text import exceeds_depth
from emberkeep.types.request import Json

MAX_DEPTH = 64
MAX_VALUES = 600_000
"""Values and keys of a body: 100,000 messages. While they are parsed, a third of a second, all threads wait."""


class Body(BaseModel):
    """Unknown fields are ignored, as OpenAI does; known ones must have exactly their JSON type.

    A body's validator is built when it is first used, which is safe from any thread.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)


B = TypeVar("B", bound=Body)


def parse_body(model: type[B], raw: bytes) -> B:
    """Raises RequestError, or InvalidField with the path of the first bad field."""
    return validate(model, parse_object(raw))


def validate(model: type[B], value: Mapping[str, Json]) -> B:
    """Raises InvalidField with the path of the first bad field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise refusal(first["loc"], first["type"], first.get("ctx", {})) from None


def validate_at(model: type[B], value: Mapping[str, Json], path: str) -> B:
    """As `validate`, of what stands at `path` in a body."""
    try:
        return validate(model, value)
    except InvalidField as error:
        raise InvalidField(f"{path}.{error.param}", str(error).removeprefix(f"{error.param}: ")) from None


def parse_object(raw: bytes) -> dict[str, Json]:
    """Raises RequestError."""
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.")
    return value


def parse_list(raw: bytes) -> list[Json]:
    """Raises RequestError."""
    value = parse_json(raw)
    if not isinstance(value, list):
        raise RequestError("The body must be a JSON list.")
    return value


def parse_json(raw: bytes) -> Json:
    """Raises RequestError."""
    if _values(raw) > MAX_VALUES and _values(_without_strings(raw)) > MAX_VALUES:
        raise RequestError(f"The body has more than {MAX_VALUES:,} values: send less.")
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            # Half of a surrogate pair is valid JSON, and cannot be encoded or tokenised.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise RequestError(f"The body is not valid JSON: {error.msg} at {where}.") from None
    except UnicodeDecodeError:
        raise RequestError("The body is not valid UTF-8: send JSON encoded as UTF-8.") from None
    except UnicodeEncodeError:
        raise RequestError(f"The body cannot be used: {HALF_A_CHARACTER}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    if exceeds_depth(value, MAX_DEPTH):
        raise _too_deep()
    return value


def _values(raw: bytes) -> int:
    """At least the number of values and keys: each but the first follows one of these characters."""
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{") + raw.count(b":")


def _without_strings(raw: bytes) -> bytes:
    """Without the strings, whose commas do not count. Stops after as many strings as values are allowed."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(unescaped.split(b'"', 2 * MAX_VALUES)[::2])


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not a number in JSON")


def _too_deep() -> RequestError:
    return RequestError(f"The body is nested too deeply: use at most {MAX_DEPTH} levels.")


# ── kinds of fields ──

INT32_MAX = 2**31 - 1

NO_OTHERS: dict[str, Json] = {"additionalProperties": False}
"""For the schema of a mapping: no other keys are allowed, which pydantic does not say."""


def not_here(way_out: str) -> BeforeValidator:
    """For a field of type None: whatever is given for it is refused with this sentence."""

    def refuse(given: Json) -> None:
        if given not in (None, []):
            raise ValueError(way_out)

    return BeforeValidator(refuse)


def one_of(*names: str) -> dict[str, Json]:
    """For the schema of a body: one of these is given, and not empty."""
    given = ({"required": [name], "properties": {name: {"not": {"enum": [None, "", []]}}}} for name in names)
    return {"anyOf": list(given)}


def whole(number: Json) -> Json:
    """Some languages have one kind of numbers only, and write 2 as 2.0."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


WHOLE = BeforeValidator(whole)
"""For an integer, after its bounds: before them, the schema would not have these."""

Count = Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE]
Label = Annotated[str, Field(max_length=512)]
Name = Annotated[str, Field(min_length=1, max_length=512)]


class ByKind:
    """For a union: its members are told apart by their JSON type, and objects by what `type` says in them.

    An error names the place in the member that was meant, or all that could stand there.
    """

    def __init__(self, sentence: str = "") -> None:
        """`sentence`: what to say instead of a list of the members; `{kind}` in it is what was given."""
        self._sentence = sentence

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        members = {kind: handler.generate_schema(one) for one in get_args(source) for kind in _kinds_of(one)}
        tags, sentence = {kind: f"~{kind}" for kind in members}, self._sentence or _either(list(members))

        def choose(value: Any) -> str:
            tag = tags.get(_kind(value))
            return tag or (tags.get(_WHATEVER_TYPE) if type(value) is dict else None) or _NONE_OF_THEM

        def refuse(value: Any) -> None:
            raise ValueError(sentence.replace("{kind}", repr(_kind(value)[:64])))

        choices = {tags[kind]: member for kind, member in members.items()}
        nothing = core_schema.no_info_before_validator_function(refuse, core_schema.any_schema())
        return core_schema.tagged_union_schema({**choices, _NONE_OF_THEM: nothing}, choose)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Json]:
        """An object may agree with more than one member, which `oneOf` would forbid."""
        found = handler(schema)
        return {"anyOf": [member for member in found["oneOf"] if member]} if "oneOf" in found else found


BY_KIND = ByKind()
_NONE_OF_THEM = "~"
_OBJECT, _WHATEVER_TYPE = "an object", "an object of any type"
_JSON_KINDS = {str: "a text", list: "a list", dict: _OBJECT, bool: "true or false", NoneType: "null"}


def _kinds_of(member: Any) -> Iterator[str]:
    """What a value of this type is, as `_kind` says it."""
    while get_origin(member) is Annotated:
        member = get_args(member)[0]
    if get_origin(member) is Literal:
        yield from dict.fromkeys(map(_kind, get_args(member)))
    elif member in (str, bool, NoneType) or get_origin(member) is list:
        yield _JSON_KINDS[get_origin(member) or member]
    elif get_origin(member) is dict or (kind := get_type_hints(member).get("type")) is None:
        yield from (_OBJECT, _WHATEVER_TYPE)
    else:
        literals = [each for each in (kind, *get_args(kind)) if get_origin(each) is Literal]
        yield from (text for each in literals for text in get_args(each))
        if NoneType in get_args(kind):
            yield _OBJECT


def _kind(value: Any) -> str:
    if type(value) is dict:
        kind = value.get("type")
        return _OBJECT if kind is None else str(kind)
    return _JSON_KINDS.get(type(value), "something else")


def _either(kinds: list[str]) -> str:
    """Which kinds there are, as a sentence."""
    others = [kind for kind in _JSON_KINDS.values() if kind in kinds]
    types = [kind for kind in kinds if kind not in (*others, _WHATEVER_TYPE)]
    if types:
        others = [kind for kind in others if kind != _OBJECT] + [f"an object of type {' or '.join(types)}"]
    return f"give {' or '.join(others)}"


# ── refusals in our words ──

TOOL_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
USER_ID = r"^[A-Za-z0-9_-]{0,512}$"
TOKEN_ID = r"^[0-9]{1,9}$"
TEMPLATE_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"

HALF_A_CHARACTER = "a text holds half of a surrogate pair, such as \\ud800: send whole characters."

_PATTERNS = {
    TOOL_NAME: "use 1 to 128 letters, digits, dots, - and _",
    USER_ID: "use up to 512 letters, digits, - and _",
    TOKEN_ID: "a token id is written with 1 to 9 digits",
    TEMPLATE_NAME: "use 1 to 64 letters, digits and _, and no digit first",
}

_PHRASES = {
    "missing": "is required",
    "string_type": "give a text",
    "string_unicode": "give whole characters, and no half of a surrogate pair such as \\ud800",
    "bool_type": "give true or false",
    "int_type": "give a whole number",
    "int_parsing_size": "give a smaller number",
    "float_type": "give a number",
    "list_type": "give a list",
    "dict_type": "give an object",
    "model_type": "give an object",
    "literal_error": "give {expected}",
    "greater_than": "give more than {gt}",
    "greater_than_equal": "give {ge} or more",
    "less_than": "give less than {lt}",
    "less_than_equal": "give {le} or less",
    "string_too_short": "give {min_length} or more characters",
    "string_too_long": "give {max_length} or fewer characters",
    "too_short": "give {min_length} or more entries",
    "too_long": "give {max_length} or fewer entries",
}
"""Our words for pydantic's kinds of errors: its own sentences are for people who know pydantic."""

_LONGEST_NAME = 64


def refusal(location: tuple[int | str, ...], kind: str, context: Mapping[str, Any]) -> InvalidField:
    """One of pydantic's errors in our words."""
    return InvalidField(_path(location), f"{_phrase(kind, context)}.")


def _phrase(kind: str, context: Mapping[str, Any]) -> str:
    if kind == "value_error":  # raised by one of our own validators
        return str(context["error"])
    if kind == "string_pattern_mismatch":
        return _PATTERNS[context["pattern"]]
    shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in context.items()}
    return _PHRASES.get(kind, "has a value that cannot be used").format_map(shown)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`; which of several kinds it was (`~text`) is left out."""
    parts = [part for part in location if part != "[key]" and not str(part).startswith("~")]
    shown = [f"[{part}]" if isinstance(part, int) else f".{part[:_LONGEST_NAME]}" for part in parts]
    return "".join(shown).removeprefix(".")
