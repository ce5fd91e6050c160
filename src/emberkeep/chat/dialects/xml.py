"""Calls as tags, with an element or attribute for each argument. Values get their type from the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from emberkeep.chat.dialects.json_calls import Arguments, as_json
from emberkeep.chat.dialects.reader import Calls, NoCall, Reading, Tape
from emberkeep.types.request import Json, Tool
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class Element:
    """How a dialect writes a call: `<invoke name="f">`, `<parameter name="k">v</parameter>`, `</invoke>`."""

    start: str
    """Up to the name."""
    name_end: str
    end: str
    parameter: str
    """Up to the key."""
    key_end: str
    value_end: str


FUNCTION = Element("<function=", ">", "</function>", "<parameter=", ">", "</parameter>")


def attribute_element(call: str, parameter: str) -> Element:
    ends = f"</{call}>", f"</{parameter}>"
    return Element(f'<{call} name="', '"', ends[0], f'<{parameter} name="', '"', ends[1])


ELEMENTS = {
    element.start: element
    for element in (
        FUNCTION,
        attribute_element("invoke", "parameter"),
        attribute_element("function", "param"),
        attribute_element("tool", "parameter"),
        attribute_element("｜DSML｜invoke", "｜DSML｜parameter"),
        attribute_element("atem:invoke", "atem:parameter"),
    )
}


class _Object:
    """Arguments as JSON, one by one."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._count = 0
        calls.open()

    def add(self, key: str, text: str) -> None:
        before = ", " if self._count else "{"
        value = _typed_json(self._calls.tool, key, text)
        self._calls.add(f"{before}{as_json(key)}: {value}")
        self._count += 1

    def end(self) -> None:
        self._calls.add("}" if self._count else "{}")
        self._calls.end()


def element_call(tape: Tape, calls: Calls, element: Element) -> Reading[None]:
    """A call whose `start` has been read. Raises NoCall."""
    name, stop = yield from tape.until(element.name_end, "\n")
    if stop != element.name_end:
        raise NoCall
    calls.set_name(name.strip().strip("\"'"))
    if element.name_end != ">":
        yield from tape.until(">")
    yield from tape.skip()
    following = yield from tape.sees(element.parameter, element.end, "{")
    if following == "{":
        yield from _as_json(tape, calls, element)
    elif following:
        yield from _parameters(tape, calls, element)
    else:
        raise NoCall


def _as_json(tape: Tape, calls: Calls, element: Element) -> Reading[None]:
    yield from Arguments(calls).read(tape, element.end)
    yield from tape.until(element.end)
    if not tape.is_cut_here:
        calls.end()


def _parameters(tape: Tape, calls: Calls, element: Element) -> Reading[None]:
    arguments = _Object(calls)
    while (yield from tape.takes(element.parameter)):
        key, _ = yield from tape.until(element.key_end)
        if element.key_end != ">":
            yield from tape.until(">")
        # Some forget the end of a parameter, or of the last one.
        value, stop = yield from tape.until(element.value_end, element.parameter, element.end)
        if tape.is_cut_here and not stop:
            return
        arguments.add(key.strip(), _without_margin(value))
        if stop != element.value_end:
            tape.at -= len(stop)
        yield from tape.skip()
    if not (yield from tape.takes(element.end)) and tape.is_cut_here:
        return
    arguments.end()


def _without_margin(value: str) -> str:
    """Templates put the value on lines of its own."""
    return value.removeprefix("\n").removesuffix("\n")


def key_value_call(tape: Tape, calls: Calls, name: str) -> Reading[None]:
    """GLM: a name, then `<arg_key>k</arg_key><arg_value>v</arg_value>` for every argument."""
    calls.set_name(name)
    arguments = _Object(calls)
    while (yield from tape.takes("<arg_key>")):
        key, _ = yield from tape.until("</arg_key>")
        yield from tape.until("<arg_value>")
        value, stop = yield from tape.until("</arg_value>", "</tool_call>")
        if tape.is_cut_here and not stop:
            return
        arguments.add(key.strip(), value)
        if stop == "</tool_call>":
            tape.at -= len(stop)
        yield from tape.skip()
    if not tape.is_cut_here:
        arguments.end()


_ATTRIBUTE = re.compile(r"[\w.:-]*")
_ENTITY = re.compile(r"&(?:(quot|apos|lt|gt|amp)|#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6}));")
_ENTITIES = {"quot": '"', "apos": "'", "lt": "<", "gt": ">", "amp": "&"}


def tag_call(tape: Tape, calls: Calls, name: str) -> Reading[None]:
    """A tag that is called as a tool: `<name k="v" l='w'/>` or `<name k="v"></name>`, `<name` having been read.

    It is passed on as a whole: only its end tells it from an element with something in it. Raises NoCall.
    """
    if not calls.knows(name):
        raise NoCall
    calls.set_name(name)
    arguments: dict[str, str] = {}
    yield from tape.skip()
    while not (end := (yield from tape.takes("/>", ">"))):
        key, text = yield from _attribute(tape)
        if key in arguments:
            raise NoCall
        arguments[key] = _typed_json(calls.tool, key, text)
        yield from tape.skip()
    if end == ">":
        yield from tape.skip()
        if not (yield from tape.takes(f"</{name}>")):
            raise NoCall
    members = ", ".join(f"{as_json(key)}: {value}" for key, value in arguments.items())
    calls.add_call(name, f"{{{members}}}")


def _attribute(tape: Tape) -> Reading[tuple[str, str]]:
    """Raises NoCall."""
    key = yield from tape.word(_ATTRIBUTE)
    yield from tape.skip()
    is_given = bool(key) and bool((yield from tape.takes("=")))
    yield from tape.skip()
    quote = (yield from tape.takes('"', "'")) if is_given else ""
    if not quote:
        raise NoCall
    text, end = yield from tape.until(quote)
    if not end:
        raise NoCall
    return key, _ENTITY.sub(_character, text)


def _character(entity: re.Match[str]) -> str:
    """What cannot be sent stays as it was written: NUL, half of a surrogate pair, what is beyond Unicode."""
    name, decimal, hexadecimal = entity.groups()
    if name:
        return _ENTITIES[name]
    code = int(decimal) if decimal else int(hexadecimal, 16)
    is_character = 0 < code < 0xD800 or 0xE000 <= code <= 0x10FFFF
    return chr(code) if is_character else entity[0]


def _typed_json(tool: Tool, key: str, text: str) -> str:
    """`text` as the JSON value that the tool's schema wants for `key`."""
    schema = tool.parameters.get("properties", {}).get(key, {})
    if not _takes_text(schema):
        try:
            json.loads(text, parse_constant=_refuse)
            return text.strip()
        except (ValueError, RecursionError):
            if text.strip() in _PYTHONS:
                return _PYTHONS[text.strip()]
    return as_json(text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_PYTHONS = {"True": "true", "False": "false", "None": "null"}


def _takes_text(schema: Json) -> bool:
    if not isinstance(schema, Mapping):
        return False
    if isinstance(schema.get("enum"), list):
        return all(isinstance(value, str) for value in schema["enum"])
    either = schema.get("anyOf") or schema.get("oneOf") or ()
    return schema.get("type") == "string" or any(_takes_text(option) for option in either)
