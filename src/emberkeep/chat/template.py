"""A model's chat template: messages in, prompt text out, and what can be found out about it by trying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from emberkeep.chat.budget import MAX_SECONDS, MORE_SECONDS_PER_MESSAGE
from emberkeep.chat.jinja import JinjaTemplate
from emberkeep.chat.messages import system_in_first_user, tools_as_text, values_for
from emberkeep.chat.render_pool import IsolatedTemplate
from emberkeep.chat.writing import Writing
from emberkeep.types import Json, Message, Tool

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

NO_ARGS: Final[Mapping[str, Json]] = MappingProxyType({})


class ChatTemplate:
    """Immutable after construction; `render` may be called from any thread and blocks for at most seconds.

    A template out of a model file runs in a process of its own. Raises TemplateFailed when `source` is not a
    template or cannot be tried in time, and Overloaded when there can be no such process now.
    """

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        # Ours is known to end, and needs no process.
        self._template = JinjaTemplate(source) if source == CHATML else IsolatedTemplate(source)
        self._specials = {"bos_token": bos, "eos_token": eos}
        self._traits = self._template.traits(self._specials, MAX_SECONDS)

    @classmethod
    def default(cls, *, bos: str = "", eos: str = "") -> ChatTemplate:
        """For models that bring no template: ChatML, which most models have seen."""
        return cls(CHATML, bos=bos, eos=eos)

    @property
    def supports_tools(self) -> bool:
        """The template writes tool definitions, calls and results; otherwise they are written as text for it."""
        return self._traits.supports_tools

    @property
    def writing(self) -> Writing:
        """How a call is written that the model is made to write."""
        return self._traits.writing

    @property
    def turn_end(self) -> str:
        """What always follows an assistant's content, up to the next message's header. Empty when unknown."""
        return self._traits.turn_end

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        args: Mapping[str, Json] = NO_ARGS,
    ) -> str:
        """The prompt; the same for the same input, unless the template asks for the date.

        Raises TemplateFailed, Overloaded.
        """
        traits = self._traits
        if not traits.supports_tools:
            messages, tools = tools_as_text(messages, tools), ()
        if not traits.supports_system:
            messages = system_in_first_user(messages)
        values = {
            **args,
            "add_generation_prompt": add_generation_prompt,
            **self._specials,
            **values_for(messages, tools, traits.form, has_empty_list=traits.loops_over_no_tools),
        }
        return self._template.render(values, MAX_SECONDS + MORE_SECONDS_PER_MESSAGE * len(messages))
