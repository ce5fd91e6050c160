"""What can be found out about a template by trying: which messages it writes, and how."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

from emberkeep.chat.messages import CALL_FORMS, CallForm, values_for
from emberkeep.chat.segments import common_prefix
from emberkeep.chat.writing import TAGGED_JSON, Writing, find_writing
from emberkeep.errors import TemplateFailed
from emberkeep.types import Json, Message, Tool, ToolCall

_TRY_SECONDS = 0.25
_LONGEST = 4096
"""Characters of a text that a template writes around every answer or call."""
_LONGEST_JSON = 1 << 18

Write = Callable[[Mapping[str, Json], float], str]
"""(variables, seconds) to text. Raises TemplateFailed."""


@dataclass(frozen=True, slots=True)
class Traits:
    loops_over_no_tools: bool
    """It goes through the tools without asking for any; most templates compare with none."""
    supports_system: bool
    """The template writes a system message; otherwise it goes before the first user's text."""
    supports_tools: bool
    """The template writes tool definitions, calls and results; otherwise they are written as text for it."""
    form: CallForm
    writing: Writing
    """How a call is written that the model is made to write."""
    turn_end: str
    """What always follows an assistant's content, up to the next message's header. Empty when unknown."""

    def to_json(self) -> str:
        form = CALL_FORMS.index(self.form)
        head = (self.loops_over_no_tools, self.supports_system, self.supports_tools, form)
        return json.dumps([*head, astuple(self.writing), self.turn_end])

    @classmethod
    def from_json(cls, text: str) -> Traits:
        """From whoever ran a foreign template: nothing but the types is believed. Raises ValueError."""
        if len(text) > _LONGEST_JSON:
            raise ValueError("too long")
        try:
            no_tools, system, tools, form, (before, between, separator, after), turn_end = json.loads(text)
            return cls(
                bool(no_tools),
                bool(system),
                bool(tools),
                CALL_FORMS[form],
                Writing(str(before), str(between), None if separator is None else str(separator), str(after)),
                str(turn_end),
            )
        except (TypeError, IndexError, RecursionError) as error:
            raise ValueError(str(error)) from error


def find_traits(write: Write, specials: Mapping[str, str], seconds: float) -> Traits:
    """Tries for `seconds` at most, unless one step of the template takes longer."""
    return _Trial(write, specials, seconds).traits()


class _Trial:
    def __init__(self, write: Write, specials: Mapping[str, str], seconds: float) -> None:
        self._write = write
        self._specials = specials
        self._deadline = time.monotonic() + seconds
        self._loops_over_no_tools = False

    def traits(self) -> Traits:
        if not self._tried(_ASK):
            self._loops_over_no_tools = True
        written = self._tried([Message("system", "ember7s"), Message("user", "ember7u")])
        turn_end = self._find_turn_end()
        form = self._find_call_form() if "ember7f" in self._tried(_ASK, [_TOOL]) else None
        return Traits(
            loops_over_no_tools=self._loops_over_no_tools,
            supports_system="ember7s" in written,
            supports_tools=form is not None,
            form=form or CALL_FORMS[0],
            writing=(form and self._find_writing(form, turn_end)) or TAGGED_JSON,
            turn_end=turn_end,
        )

    def _find_turn_end(self) -> str:
        turns = [Message("user", "ember7u"), Message("assistant", "ember7a")]
        last = self._tried(turns)
        followed = self._tried([*turns, Message("user", "ember7v")])
        ends = [text.partition("ember7a")[2] for text in (last, followed)]
        shared = ends[0][: common_prefix(*ends)]
        if len(shared) > _LONGEST:
            return ""
        # Two different markers may begin alike (`<|end|>\n<|user|>`, `<|end|>\n<|endoftext|>`).
        return re.sub(r"[<\[][^>\]]*$", "", shared)

    def _find_call_form(self) -> CallForm | None:
        for form in CALL_FORMS:
            written = self._tried([*_ASK, *_CALLED], [_TOOL], form)
            if all(word in written for word in ("ember7x", "ember7r")):
                return form
        return None

    def _find_writing(self, form: CallForm, turn_end: str) -> Writing | None:
        plain = self._tried([*_ASK, Message("assistant", "ember7a")], [_TOOL], form)
        one, two = (
            self._tried([*_ASK, Message("assistant", tool_calls=calls)], [_TOOL], form)
            for calls in (_WRITTEN[:1], _WRITTEN)
        )
        header = common_prefix(plain, one)
        one, two = (text[header:].partition(turn_end or "\0")[0] for text in (one, two))
        found = find_writing(one, two, ("ember7f", "ember7g"), "ember7k")
        is_long = found and any(len(part or "") > _LONGEST for part in astuple(found))
        return None if is_long else found

    def _tried(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), form: CallForm = CALL_FORMS[0]
    ) -> str:
        """What it writes; nothing where it fails, takes long, or too much was tried already."""
        values = {
            "add_generation_prompt": False,
            **self._specials,
            **values_for(messages, tools, form, has_empty_list=self._loops_over_no_tools),
        }
        try:
            return self._write(values, min(_TRY_SECONDS, self._deadline - time.monotonic()))
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
