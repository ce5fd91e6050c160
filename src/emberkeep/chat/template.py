"""A model's chat template: messages in, prompt text out, and what can be found out about it by trying."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from jinja2 import TemplateError

from emberkeep.chat.budget import MAX_OUTPUT, MAX_SECONDS, MORE_SECONDS_PER_MESSAGE, OutOfBudget, budget
from emberkeep.chat.messages import (
    CALL_FORMS,
    CallForm,
    as_dict,
    canonical_tools,
    system_in_first_user,
    tools_as_text,
)
from emberkeep.chat.sandbox import compile_template
from emberkeep.chat.writing import TAGGED_JSON, Writing, find_writing
from emberkeep.errors import TemplateFailed
from emberkeep.types import Json, Message, Tool, ToolCall

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_PROBE_SECONDS = 0.25
NO_ARGS: Final[Mapping[str, Json]] = MappingProxyType({})


class ChatTemplate:
    """Immutable after construction; `render` may be called from any thread and blocks for at most seconds.

    Raises TemplateFailed when `source` is not a template.
    """

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        try:
            self._template = compile_template(source)
        # Foreign code: Jinja, Python's parser and its recursion limit all have their say.
        except Exception as error:
            raise TemplateFailed(f"The model's chat template is not valid Jinja: {_reason(error)}.") from error
        self._specials = {"bos_token": bos, "eos_token": eos}
        # Most templates compare with none; some loop over the tools without asking.
        self._no_tools: list[Json] | None = None
        self._probe()

    @classmethod
    def default(cls, *, bos: str = "", eos: str = "") -> ChatTemplate:
        """For models that bring no template: ChatML, which most models have seen."""
        return cls(CHATML, bos=bos, eos=eos)

    supports_tools: bool
    """The template writes tool definitions, calls and results; otherwise they are written as text for it."""
    supports_system: bool
    """The template writes a system message; otherwise it goes before the first user's text."""
    writing: Writing
    """How a call is written that the model is made to write."""
    turn_end: str
    """What always follows an assistant's content, up to the next message's header. Empty when unknown."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        args: Mapping[str, Json] = NO_ARGS,
    ) -> str:
        """The prompt; the same for the same input, unless the template asks for the date.

        Raises TemplateFailed.
        """
        if not self.supports_tools:
            messages, tools = tools_as_text(messages, tools), ()
        if not self.supports_system:
            messages = system_in_first_user(messages)
        variables = {**args, "add_generation_prompt": add_generation_prompt}
        seconds = MAX_SECONDS + MORE_SECONDS_PER_MESSAGE * len(messages)
        return self._write(messages, tools, variables, self._form, seconds)

    def _write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: Mapping[str, Json],
        form: CallForm,
        seconds: float,
    ) -> str:
        values = {
            **variables,
            **self._specials,
            "messages": [as_dict(message, form) for message in messages],
            "tools": canonical_tools(tools) or self._no_tools,
        }
        try:
            with budget(seconds):
                text = self._template.render(values)
        except OutOfBudget as error:
            raise TemplateFailed(f"The model's chat template was stopped: {error}.", "messages") from error
        # Foreign code may fail in any way; all of them mean that it cannot write these messages.
        except Exception as error:
            raise TemplateFailed(
                f"The model's chat template refused these messages ({_reason(error)}): "
                "change them to what it expects.",
                "messages",
            ) from error
        if len(text) > MAX_OUTPUT:
            raise TemplateFailed("The prompt is too long to be tokenised: shorten the messages.", "messages")
        return text

    # ── probing: never raises ──

    def _probe(self) -> None:
        if not self._tried(_ASK):
            self._no_tools = []
        written = self._tried([Message("system", "ember7s"), Message("user", "ember7u")])
        self.supports_system = "ember7s" in written
        self.turn_end = self._find_turn_end()
        form = self._find_call_form() if "ember7f" in self._tried(_ASK, [_TOOL]) else None
        self.supports_tools = form is not None
        self._form = form or CALL_FORMS[0]
        self.writing = (form and self._find_writing(form)) or TAGGED_JSON

    def _find_turn_end(self) -> str:
        turns = [Message("user", "ember7u"), Message("assistant", "ember7a")]
        last = self._tried(turns)
        followed = self._tried([*turns, Message("user", "ember7v")])
        ends = [text.partition("ember7a")[2] for text in (last, followed)]
        shared = _common_prefix(*ends)
        # Two different markers may begin alike (`<|end|>\n<|user|>`, `<|end|>\n<|endoftext|>`).
        return re.sub(r"[<\[][^>\]]*$", "", shared)

    def _find_call_form(self) -> CallForm | None:
        for form in CALL_FORMS:
            written = self._tried([*_ASK, *_CALLED], [_TOOL], form)
            if all(word in written for word in ("ember7x", "ember7r")):
                return form
        return None

    def _find_writing(self, form: CallForm) -> Writing | None:
        plain = self._tried([*_ASK, Message("assistant", "ember7a")], [_TOOL], form)
        one, two = (
            self._tried([*_ASK, Message("assistant", tool_calls=calls)], [_TOOL], form)
            for calls in (_WRITTEN[:1], _WRITTEN)
        )
        header = len(_common_prefix(plain, one))
        one, two = (text[header:].partition(self.turn_end or "\0")[0] for text in (one, two))
        return find_writing(one, two, ("ember7f", "ember7g"), "ember7k")

    def _tried(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), form: CallForm = CALL_FORMS[0]
    ) -> str:
        variables = {"add_generation_prompt": False}
        try:
            return self._write(messages, tools, variables, form, _PROBE_SECONDS)
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


def _common_prefix(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


def _reason(error: Exception) -> str:
    """The first line of a foreign error, short enough for one sentence."""
    text = error.message if isinstance(error, TemplateError) else str(error)
    line = (text or type(error).__name__).strip().partition("\n")[0]
    return line[:200].rstrip(".")
