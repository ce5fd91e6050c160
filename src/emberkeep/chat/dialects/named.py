"""Calls whose name stands before their arguments, outside of the JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass

from emberkeep.chat.dialects.calls import Calls, NoCall
from emberkeep.chat.dialects.json_calls import Arguments
from emberkeep.chat.dialects.tape import Reading, Tape

_COUNTED = re.compile(r"^functions\.|:\d+$")
"""Kimi: `functions.get_weather:0`."""


def arguments_of(tape: Tape, calls: Calls, name: str, end: str) -> Reading[None]:
    """The object that comes next, of a call of this name. Raises NoCall where there is none."""
    calls.named(name)
    yield from tape.skip()
    yield from Arguments(calls).read(tape, end)
    if not calls.is_open:
        raise NoCall
    if not tape.is_cut_here:
        calls.end()


@dataclass(frozen=True, slots=True)
class Steps:
    """`begin`, something or nothing, `name`, the name, `arguments`, the arguments, `end`; again for every call."""

    begin: str
    name: str
    arguments: str
    end: str


STEPS = {
    steps.begin: steps
    for steps in (
        Steps("<｜tool▁call▁begin｜>", "", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),  # DeepSeek R1, V3
        Steps("<|tool_call_begin|>", "", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),  # Kimi K2
        Steps("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),  # Solar
    )
}


def stepped_call(tape: Tape, calls: Calls, steps: Steps) -> Reading[None]:
    """A call whose `begin` has been read."""
    if steps.name:
        yield from tape.until(steps.name)
    name, _ = yield from tape.until(steps.arguments)
    if name == "function":  # DeepSeek V3: the kind of tool comes first, and the arguments are fenced
        name, _ = yield from tape.until("\n")
        yield from tape.takes("```json")
    yield from arguments_of(tape, calls, _COUNTED.sub("", name.strip()), steps.end)
    yield from tape.until(steps.end)


def mistral_call(tape: Tape, calls: Calls, end: str) -> Reading[None]:
    """`get_weather[ARGS]{...}`, also with an id in between, or with nothing."""
    name, stop = yield from tape.until("[ARGS]", "[CALL_ID]", "{")
    if stop == "[CALL_ID]":
        yield from tape.until("[ARGS]")
    elif stop == "{":
        tape.at -= 1
    yield from arguments_of(tape, calls, name.strip(), end)


def harmony_call(tape: Tape, calls: Calls, end: str) -> Reading[None]:
    """`get_weather<|channel|>commentary json<|message|>{...}<|call|>`, the name's prefix having been read."""
    name, stop = yield from tape.until("<|", " ")
    if stop == "<|":
        tape.at -= len(stop)
    yield from tape.until("<|message|>")
    yield from arguments_of(tape, calls, name, end)
    yield from tape.skip()
    yield from tape.takes(end)
