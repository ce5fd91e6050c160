"""What can be found out about a template by trying: which messages it writes, and how."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple

from emberkeep.chat.dialects.table import HARMONY, TAGGED
from emberkeep.chat.messages import CALL_FORMS, CallForm, values_for
from emberkeep.chat.sections import SectionKind, Sections, pieces_of, text_of
from emberkeep.errors import TemplateFailed
from emberkeep.text import common_start
from emberkeep.types.request import Json, Message, Tool, ToolCall
from emberkeep.values import dataclass

_LONGEST = 4096
"""Characters of a text that a template writes around every answer or call."""
_LONGEST_JSON = 1 << 18

Write = Callable[[Mapping[str, Json]], str]
"""Variables to text. Raises TemplateFailed."""


@dataclass(frozen=True, slots=True)
class CallWriting:
    """The literal text that a template writes around calls whose arguments are JSON:
    `before` name `between` arguments, `separator` name `between` arguments, ..., `after`.
    """

    before: str
    between: str
    separator: str | None
    """None: one call only."""
    after: str

    def call(self, name: str, arguments: str) -> str:
        return f"{self.before}{name}{self.between}{arguments}{self.after}"


TAGGED_JSON = CallWriting(
    before=f'{TAGGED.start}\n{{"name": "',
    between='", "arguments": ',
    separator=f'}}\n{TAGGED.end}\n{TAGGED.start}\n{{"name": "',
    after=f"}}\n{TAGGED.end}",
)


@dataclass(frozen=True, slots=True)
class Traits:
    loops_over_no_tools: bool
    """It goes through the tools without asking for any; most templates compare with none."""
    supports_system: bool
    """The template writes a system message; otherwise it goes before the first user's text."""
    supports_later_system: bool
    """It writes one in the middle of a conversation, and there; otherwise it is a part of the user's text."""
    supports_tools: bool
    """The template writes tool definitions, calls and results; otherwise they are written as text for it."""
    form: CallForm
    writing: CallWriting
    """How a call is written that the model is made to write."""
    turn_end: str
    """What always follows an assistant's content, up to the next message's header. Empty when unknown."""

    def to_json(self) -> str:
        form = CALL_FORMS.index(self.form)
        systems = (self.supports_system, self.supports_later_system)
        head = (self.loops_over_no_tools, *systems, self.supports_tools, form)
        return json.dumps([*head, astuple(self.writing), self.turn_end])

    @classmethod
    def from_json(cls, text: str) -> Traits:
        """From the process that ran a foreign template: nothing but the types is believed. Raises ValueError."""
        if len(text) > _LONGEST_JSON:
            raise ValueError("too long")
        try:
            no_tools, system, later, tools, form, (before, between, separator, after), turn_end = json.loads(text)
            return cls(
                bool(no_tools),
                bool(system),
                bool(later),
                bool(tools),
                CALL_FORMS[form],
                CallWriting(str(before), str(between), None if separator is None else str(separator), str(after)),
                str(turn_end),
            )
        except (TypeError, IndexError, RecursionError) as error:
            raise ValueError(str(error)) from error


def find_traits(write: Write, specials: Mapping[str, str]) -> Traits:
    """Takes as long as the template does for a dozen short conversations."""
    return _Trial(write, specials).traits()


class _Trial:
    def __init__(self, write: Write, specials: Mapping[str, str]) -> None:
        self._write = write
        self._specials = specials
        self._loops_over_no_tools = False

    def traits(self) -> Traits:
        if not self._try(_ASK):
            self._loops_over_no_tools = True
        written = self._try([Message("system", "ember7s"), Message("user", "ember7u")])
        turn_end = self._find_turn_end()
        form = self._find_call_form() if "ember7f" in self._try(_ASK, [_TOOL]) else None
        return Traits(
            loops_over_no_tools=self._loops_over_no_tools,
            supports_system="ember7s" in written,
            supports_later_system=self._writes_later_systems(),
            supports_tools=form is not None,
            form=form or CALL_FORMS[0],
            writing=(form and self._find_writing(form, turn_end)) or TAGGED_JSON,
            turn_end=turn_end,
        )

    def _writes_later_systems(self) -> bool:
        turns = [Message("user", "ember7u"), Message("assistant", "ember7a"), Message("user", "ember7v")]
        written = self._try([*turns, Message("system", "ember7s")])
        return 0 <= written.find("ember7v") < written.find("ember7s")

    def _find_turn_end(self) -> str:
        turns = [Message("user", "ember7u"), Message("assistant", "ember7a")]
        last = self._try(turns)
        followed = self._try([*turns, Message("user", "ember7v")])
        ends = [text.partition("ember7a")[2] for text in (last, followed)]
        shared = ends[0][: common_start(*ends)]
        if len(shared) > _LONGEST:
            return ""
        # Two different markers may begin alike (`<|end|>\n<|user|>`, `<|end|>\n<|endoftext|>`).
        return re.sub(r"[<\[][^>\]]*$", "", shared)

    def _find_call_form(self) -> CallForm | None:
        for form in CALL_FORMS:
            written = self._try([*_ASK, *_CALLED], [_TOOL], form)
            if all(word in written for word in ("ember7x", "ember7r")):
                return form
        return None

    def _find_writing(self, form: CallForm, turn_end: str) -> CallWriting | None:
        plain = self._try([*_ASK, Message("assistant", "ember7a")], [_TOOL], form)
        one, two = (
            self._try([*_ASK, Message("assistant", tool_calls=calls)], [_TOOL], form)
            for calls in (_WRITTEN[:1], _WRITTEN)
        )
        header = common_start(plain, one)
        one, two = (text[header:].partition(turn_end or "\0")[0] for text in (one, two))
        writing = find_writing(one, two, ("ember7f", "ember7g"), "ember7k")
        is_long = writing and any(len(part or "") > _LONGEST for part in astuple(writing))
        return None if is_long else writing

    def _try(self, messages: Sequence[Message], tools: Sequence[Tool] = (), form: CallForm = CALL_FORMS[0]) -> str:
        """What it writes; nothing where it fails."""
        values = {
            "add_generation_prompt": False,
            **self._specials,
            **values_for(messages, tools, form, has_empty_list=self._loops_over_no_tools),
        }
        try:
            return self._write(values)
        except TemplateFailed:
            return ""


_ASK = [Message("user", "ember7u")]
_TOOL = Tool("ember7f", "ember7d", {"type": "object", "properties": {"ember7k": {"type": "string"}}})
_CALL = ToolCall("call_0123456789abcdef01234567", "ember7f", '{"ember7k": "ember7x"}')
_WRITTEN = tuple(
    ToolCall(f"call_{i:024}", name, f'{{"ember7k": "{name}"}}') for i, name in enumerate(("ember7f", "ember7g"))
)
_CALLED = [
    Message("assistant", tool_calls=(_CALL,)),
    Message("tool", "ember7r", tool_call_id=_CALL.id, name="ember7f"),
]


def find_writing(one: str, two: str, names: tuple[str, str], key: str) -> CallWriting | None:
    """From what a template writes for a call of the first of `names`, and for calls of both ("": it cannot).

    Every call has one argument, `key`, whose value is the call's name. None where arguments are not written as
    JSON, or where what is written could not be read again.
    """
    match = _calls(names[:1], key).fullmatch(one)
    if match is None:
        return None
    before, between, after = match["before"], match["between0"], match["after"].rstrip()
    both = _calls(names, key).fullmatch(two)
    is_alike = both and (both["before"], both["between0"], both["between1"]) == (before, between, between)
    writing = CallWriting(before, between, both["separator"] if both and is_alike else None, after)
    return writing if _is_read(writing, names[0], f'{{"{key}": "{names[0]}"}}') else None


def _calls(names: tuple[str, ...], key: str) -> re.Pattern[str]:
    parts = [rf'{name}(?P<between{i}>[^{{}}]*)\{{\s*"{key}"\s*:\s*"{name}"\s*\}}' for i, name in enumerate(names)]
    return re.compile("(?P<before>.*?)" + "(?P<separator>.*?)".join(parts) + "(?P<after>.*)", re.DOTALL)


def _is_read(writing: CallWriting, name: str, arguments: str) -> bool:
    sections = Sections({name: Tool(name)}, None, HARMONY).read_whole(writing.call(name, arguments))
    pieces = pieces_of(sections)
    is_same = "".join(piece.arguments for piece in pieces) == arguments
    is_one = [piece.name for piece in pieces if piece.name] == [name]
    return is_same and is_one and not text_of(sections, SectionKind.TEXT).strip()
