"""A model's chat template: messages in, prompt text out, and what can be found out about it by trying.

A template out of a model file is foreign code, so it runs in a process that is stopped when it takes too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from emberkeep.chat.messages import later_systems_in_users, system_in_first_user, tools_as_text, values_for
from emberkeep.chat.render_pool import ask_worker
from emberkeep.chat.render_worker import stop_error
from emberkeep.chat.traits import Traits, find_traits
from emberkeep.types.request import Json, Message, Tool

if TYPE_CHECKING:
    from emberkeep.chat.sandbox import JinjaTemplate

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

NO_ARGS: Final[Mapping[str, Json]] = MappingProxyType({})

MAX_SECONDS = 2.0
MORE_SECONDS_PER_MESSAGE = 0.01
"""Some templates look at all messages again for each message."""


class ChatTemplate:
    """Immutable after construction; `render` may be called from any thread and blocks for at most seconds.

    A template out of a model file runs in a process of its own. Raises TemplateFailed when `source` is not a
    template or cannot be tried in time, and Overloaded when there can be no such process now.
    """

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        self.source = source
        self._specials = {"bos_token": bos, "eos_token": eos}
        self._own: JinjaTemplate | None = None
        if source == CHATML:  # ours is known to end, and needs no process
            # Imported here: it brings Jinja, which else only the processes need.
            from emberkeep.chat.sandbox import JinjaTemplate

            self._own = JinjaTemplate(source)
            self.traits = find_traits(self._own.render, self._specials)
        else:
            self.traits = _traits(source, self._specials)

    @classmethod
    def default(cls, *, bos: str = "", eos: str = "") -> ChatTemplate:
        """For models that bring no template: ChatML, which most models have seen."""
        return cls(CHATML, bos=bos, eos=eos)

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
        traits = self.traits
        if not traits.supports_tools:
            messages, tools = tools_as_text(messages, tools), ()
        if not traits.supports_later_system:
            messages = later_systems_in_users(messages)
        if not traits.supports_system:
            messages = system_in_first_user(messages)
        values = {
            **args,
            "add_generation_prompt": add_generation_prompt,
            **self._specials,
            **values_for(messages, tools, traits.form, has_empty_list=traits.loops_over_no_tools),
        }
        if self._own is not None:
            return self._own.render(values)
        return ask_worker("render", self.source, values, MAX_SECONDS + MORE_SECONDS_PER_MESSAGE * len(messages))


def _traits(source: str, specials: Mapping[str, str]) -> Traits:
    """Raises TemplateFailed, Overloaded."""
    try:
        return Traits.from_json(ask_worker("traits", source, specials, MAX_SECONDS))
    except ValueError as error:
        raise stop_error("what its process answered makes no sense") from error
