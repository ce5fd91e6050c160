"""What stands between a dialect's markers: calls of any kind, one after the other or in a list."""

from __future__ import annotations

import re

from emberkeep.chat.dialects.json_calls import call_object
from emberkeep.chat.dialects.named import STEPS, CallSteps, mistral_call, python_call, stepped_call
from emberkeep.chat.dialects.reader import Calls, NoCall, Read, Reading, Tape
from emberkeep.chat.dialects.xml import ELEMENTS, Element, element_call, key_value_call, tag_call

_LIST = re.compile(r"[\s,;\[]*")
_AROUND = re.compile(r"[\s,;\[\]})]*")
"""Between calls, and what small models write too many of."""
_NAME = re.compile(r"[\w.-]*")
_STARTS = ("{", *ELEMENTS, *STEPS)


def read_calls(tape: Tape, calls: Calls, end: str) -> Reading[None]:
    """Any calls up to `end`, or up to the end of the answer. Raises NoCall where the first is none."""
    while True:
        yield from tape.skip(_AROUND)
        if not (yield from tape.char()) or (yield from tape.takes(end)):
            break
        try:
            yield from _item(tape, calls, end)
        except NoCall:
            if not calls.begun:
                raise
            yield from tape.until(end)
            break
    if not calls.begun:
        raise NoCall


def read_list(tape: Tape, calls: Calls, end: str) -> Reading[None]:
    """A list of calls, or one: there is no end marker."""
    yield from tape.skip()
    is_list = yield from tape.takes("[")
    while True:
        yield from tape.skip(_LIST)
        yield from _item(tape, calls, end)
        if not is_list:
            return
        yield from tape.skip(_LIST)
        if (yield from tape.takes("]")) or not (yield from tape.char()):
            return


def read_object(tape: Tape, calls: Calls, end: str) -> Reading[None]:
    """One object, whose brace was the marker."""
    yield from call_object(tape, calls, end, is_open=True)


def read_mistral(tape: Tape, calls: Calls, end: str) -> Reading[None]:
    """Mistral's two ways."""
    yield from tape.skip()
    is_json = (yield from tape.char()) in ("[", "{")
    yield from (read_list if is_json else mistral_call)(tape, calls, end)


def element_reader(element: Element) -> Read:
    """One call as this element, its start having been read."""
    return lambda tape, calls, end: element_call(tape, calls, element)


def tag_reader(name: str, behind: str) -> Read:
    """One call as a tag of this name, its start having been read, up to and with what stands `behind` the name."""

    def read(tape: Tape, calls: Calls, end: str) -> Reading[None]:
        tape.at -= len(behind)
        return tag_call(tape, calls, name)

    return read


def steps_reader(steps: CallSteps) -> Read:
    """One call in these steps, the first having been read."""
    return lambda tape, calls, end: stepped_call(tape, calls, steps)


def _item(tape: Tape, calls: Calls, end: str) -> Reading[None]:
    start = yield from tape.sees(*_STARTS)
    if start == "{":
        yield from call_object(tape, calls, end)
        return
    tape.at += len(start)
    if start in ELEMENTS:
        yield from element_call(tape, calls, ELEMENTS[start])
    elif start in STEPS:
        yield from stepped_call(tape, calls, STEPS[start])
    elif (yield from tape.takes("<")):
        yield from tag_call(tape, calls, (yield from _word(tape)))
    else:
        yield from _named(tape, calls, end)


def _named(tape: Tape, calls: Calls, end: str) -> Reading[None]:
    """A call that begins with the bare name: Python's way, or GLM's."""
    name = yield from _word(tape)
    if name == "print" and (yield from tape.takes("(")):  # Gemma prints what its tools return
        name = yield from _word(tape)
    if not name:
        raise NoCall
    if (yield from tape.char()) == "(":
        yield from python_call(tape, calls, name.removeprefix("default_api.").removesuffix(".call"))
        return
    yield from tape.skip()
    has_arguments = yield from tape.sees("<arg_key>")
    if not has_arguments and not (calls.knows(name) and end and (yield from tape.sees(end))):
        raise NoCall
    yield from key_value_call(tape, calls, name)


def _word(tape: Tape) -> Reading[str]:
    return (yield from tape.word(_NAME))


_PYTHON_FENCES = frozenset({"tool_call", "tool_calls", "tool_code"})
_TAGS = ("<tool_call>", "<function_calls>", "<tools>")


def read_fence(tape: Tape, calls: Calls, end: str) -> Reading[None]:
    """The language, then calls and nothing else. Any other fence is quoted: markers mean nothing in it."""
    language = yield from _word(tape)
    yield from tape.skip()
    try:
        # Behind other text, tags in a fence are an example of how calls are written.
        tag = (yield from tape.takes(*_TAGS)) if calls.is_first else ""
        if tag:
            yield from read_calls(tape, calls, tag.replace("<", "</"))
            yield from tape.until(end)
        else:
            yield from _in_fence(tape, calls, end, is_python=language in _PYTHON_FENCES)
    except NoCall:
        raise NoCall(end) from None


def _in_fence(tape: Tape, calls: Calls, end: str, *, is_python: bool) -> Reading[None]:
    yield from tape.skip(_LIST)
    if not is_python and not (yield from tape.sees("{")):
        raise NoCall
    yield from read_calls(tape, calls, end)
