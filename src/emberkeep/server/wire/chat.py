"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from emberkeep.errors import InvalidField
from emberkeep.library.checking import TEMPLATE_NAME
from emberkeep.library.fields import NO_OTHERS, Limit, RoomFields, to_limit
from emberkeep.library.messages import ChoiceField, MessageList, ToolList, check_choice, to_messages
from emberkeep.server.wire.fields import GenerationBody
from emberkeep.types import ReasoningFormat, Request, ToolChoice

TemplateName = Annotated[str, Field(pattern=TEMPLATE_NAME)]


def _plain(value: Any) -> Any:
    if isinstance(value, (dict, list)) or (isinstance(value, str) and len(value) > 4096):
        raise ValueError("give a short string, a number, true, false or null")
    return value


Scalar = Annotated[Any, PlainValidator(_plain, json_schema_input_type=bool | float | str | None)]
TemplateArgs = Annotated[dict[TemplateName, Scalar], Field(max_length=64, json_schema_extra=NO_OTHERS)]


_FORMATS = {
    "none": ReasoningFormat.INLINE,  # llama.cpp's words
    "auto": ReasoningFormat.SEPARATE,
    "deepseek": ReasoningFormat.SEPARATE,
    "hidden": ReasoningFormat.STRIP,  # other servers'
    **{str(one): one for one in ReasoningFormat},
}


class ChatBody(GenerationBody, RoomFields):
    messages: MessageList
    tools: ToolList | None = None
    tool_choice: ChoiceField = ToolChoice()
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: TemplateArgs | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "hidden", "separate", "strip", "inline"] | None = None

    def to_request(self) -> Request:
        """Raises InvalidField where fields contradict each other."""
        tools = tuple(tool.to_tool() for tool in self.tools or ())
        check_choice(self.tool_choice, tools)
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return replace(
            self.to_base(),
            messages=to_messages(self.messages),
            tools=tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            max_tokens=to_limit(limit),
            top_logprobs=self._top_logprobs(),
            template_args=self.chat_template_kwargs or {},
            reasoning=_FORMATS.get(self.reasoning_format or ""),
            evict=self.evict,
            recall=self.to_recall(),
        )

    def _top_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidField("top_logprobs", "needs logprobs to be true.")
        return None
