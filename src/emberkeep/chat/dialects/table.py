"""The dialects, as data: a start marker, an end marker, and the function that reads what stands between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

from emberkeep.chat.dialects.json_calls import call_object
from emberkeep.chat.dialects.named import (
    STEPS,
    CallSteps,
    gemma_call,
    harmony_call,
    mistral_call,
    python_call,
    stepped_call,
)
from emberkeep.chat.dialects.reader import Calls, Dialect, NoCall, Read, Reading, Tape
from emberkeep.chat.dialects.xml import ELEMENTS, Element, element_call, key_value_call, tag_call
from emberkeep.text import alternatives
from emberkeep.values import dataclass

# ── what stands between the markers: calls of any kind, one after the other or in a list ──

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


# ── the table ──

TAGGED = Dialect("<tool_call>", "</tool_call>", read_calls)

BARE = Dialect("", "", read_list, any_name=False)
"""Where the answer begins with a bracket: JSON, or a list of Python calls."""

MARKED_DIALECTS = (
    TAGGED,
    Dialect("<tool_calls>", "</tool_calls>", read_calls),  # Jamba, Hunyuan, MiniMax M1, Apriel
    Dialect("<function_calls>", "</function_calls>", read_calls),  # Olmo 3, and models that know Claude
    Dialect("<minimax:tool_call>", "</minimax:tool_call>", read_calls),
    Dialect("<seed:tool_call>", "</seed:tool_call>", read_calls),
    Dialect("<longcat_tool_call>", "</longcat_tool_call>", read_calls),
    Dialect("<TOOLCALL>", "</TOOLCALL>", read_calls),  # Nemotron
    Dialect("<|python_start|>", "<|python_end|>", read_calls),  # Llama 4
    Dialect("[TOOL_REQUEST]", "[END_TOOL_REQUEST]", read_calls),  # models that LM Studio told how
    Dialect("<|tool_call_start|>", "<|tool_call_end|>", read_calls),  # LFM2
    Dialect("<|START_ACTION|>", "<|END_ACTION|>", read_calls),  # Command R7B
    Dialect("<|tools_prefix|>", "<|tools_suffix|>", read_calls),  # Apertus
    Dialect("<|action_start|><|plugin|>", "<|action_end|>", read_calls),  # InternLM 2
    Dialect("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", read_calls),  # DeepSeek R1, V3
    Dialect("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", read_calls),  # DeepSeek V3.2
    Dialect("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", read_calls),  # DeepSeek V4
    Dialect("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", read_calls),  # Kimi K2
    Dialect("<|tool_calls|>", "<|calls|>", read_calls),  # Solar Open
    Dialect("<atem:function_calls>", "</atem:function_calls>", read_calls),  # Muse
    Dialect("[TOOL_CALLS]", "", read_mistral),  # Mistral
    Dialect("<|tool_call|>", "", read_list),  # Granite 3, Phi-4 mini
    Dialect("<function_call>", "", read_list),  # Granite 20B
    Dialect("<|function_call|>", "", read_list),  # GigaChat 3.1
    Dialect("function call<|role_sep|>", "", read_list),  # GigaChat 3
    Dialect("<|python_tag|>", "", read_list),  # Llama 3
    Dialect("<|tool_call>", "<tool_call|>", gemma_call),  # Gemma 4
    Dialect(" to=functions.", "<|call|>", harmony_call),  # gpt-oss
    Dialect("functools", "", read_list, any_name=False),  # Phi-4 mini, FireFunction
    Dialect("<tools>", "</tools>", read_calls, any_name=False),  # Qwen 2.5 Coder, now and then
    *(Dialect(xml.start, xml.end, element_reader(xml), any_name=False) for xml in ELEMENTS.values()),
    *(Dialect(steps.begin, steps.end, steps_reader(steps)) for steps in STEPS.values()),
    Dialect("```", "```", read_fence, any_name=False),
    Dialect("\n{", "", read_object, any_name=False),  # Llama 3 and Qwen 2.5, after some words
    Dialect(" {", "", read_object, any_name=False),
)

_BEHIND_NAMES = (" ", "\t", "\n", "/>", ">")


def tag_dialects(names: Iterable[str]) -> Iterator[Dialect]:
    """For tools that are called as tags: `<name key="value"/>`. A tool whose tag is a part of another marker, or
    has one in it, is not called so."""
    pairs = [(one.start, one.end) for one in MARKED_DIALECTS] + [(one.start, one.end) for one in REASONING]
    markers = {text for pair in pairs for text in pair if text}
    joined, any_of_them = "\0".join(markers), alternatives(markers)
    assert any_of_them
    for name, behind in product(names, _BEHIND_NAMES):
        start = f"<{name}{behind}"
        if start not in joined and not any_of_them.search(start):
            yield Dialect(start, "/>", tag_reader(name, behind), any_name=False)


STRAY_ENDS = ("</tool_call>", "</function_call>", "<|/tool_call|>")
"""Behind a call that was read without them they are no text."""

HARMONY = (
    "<|start|>assistant",
    "<|channel|>analysis",
    "<|channel|>commentary",
    "<|channel|>final",
    "<|constrain|>json",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
"""What gpt-oss writes around its messages. The first begins another message."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    start: str
    end: str


REASONING = (
    Reasoning("<think>", "</think>"),
    Reasoning("<thinking>", "</thinking>"),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<mm:think>", "</mm:think>"),
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    Reasoning("<|channel>thought", "<channel|>"),
    Reasoning("<unused94>thought", "<unused95>"),
    Reasoning("<|channel|>analysis<|message|>", "<|end|>"),
)


def _tokens_in(texts: Iterable[str]) -> frozenset[str]:
    """Everything that looks like one token of markup."""
    return frozenset(token for text in texts for token in re.findall(r"<[^<>]+>|\[[A-Z/_]+\]", text))


_INNER = ("[ARGS][CALL_ID]", '<|"|>', "<arg_key></arg_key><arg_value></arg_value>", "<｜tool▁sep｜>")

HARMONY_TOKENS = _tokens_in(HARMONY)

MARKER_TOKENS = (
    _tokens_in(
        [
            *_INNER,
            *STRAY_ENDS,
            *(text for block in REASONING for text in (block.start, block.end)),
            *(text for dialect in MARKED_DIALECTS for text in (dialect.start, dialect.end)),
            *(text for steps in STEPS.values() for text in (steps.begin, steps.name, steps.arguments, steps.end)),
            *(text for xml in ELEMENTS.values() for text in (xml.end, xml.value_end)),
        ]
    )
    - HARMONY_TOKENS
)
"""Control tokens that a reader has to see. gpt-oss's are left out: other models mean something else by them."""
