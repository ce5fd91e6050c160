"""Anthropic's Messages: the bodies of `/v1/messages` and `/v1/messages/count_tokens`, as a `Request`.

A message of theirs is a list of blocks. Texts become one text, a line each, as the parts of OpenAI's messages do:
the same texts have the same tokens, whichever way they come. Neighbours of one role become one message, because
many templates want speakers to take turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from emberkeep.api.anthropic.blocks import Block, Content, ResultBlock, Texts, ThinkingBlock, ToolUseBlock
from emberkeep.api.body import BY_KIND, INT32_MAX, WHOLE, Body, Count, Label, not_here
from emberkeep.api.errors import Failure, Refused
from emberkeep.api.fields import (
    CacheControl,
    FormatFields,
    OwnerFields,
    RoomFields,
    Schema,
    breakpoints_in_text,
    ttl_of,
)
from emberkeep.api.openai.messages import MAX_MESSAGES
from emberkeep.api.sampling import GenerationFields, Stops
from emberkeep.api.tools import ToolName, check_choice
from emberkeep.errors import InvalidField
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import (
    Breakpoint,
    Image,
    Json,
    JsonFormat,
    Message,
    ReasoningFormat,
    Request,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
    Ttl,
)
from emberkeep.values import dataclass

_SWITCHES = {"enabled": True, "disabled": False}
"""Other kinds of thinking leave it to the model."""
_EFFORTS = {"xhigh": "high", "max": "high"}
"""More than templates know."""


# ── fields ──


class MessageParam(Body):
    role: Literal["user", "assistant", "system"]
    content: Content


def _own_only(tool: Json) -> Json:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in (None, "custom"):
        raise ValueError(f"{str(kind)[:64]} is Anthropic's own: give a tool of yours, with name and input_schema")
    return tool


class ToolParam(Body):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: Schema
    cache_control: CacheControl | None = None

    def to_tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.input_schema)


class AnyChoice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None

    def to_choice(self) -> ToolChoice:
        return ToolChoice("required" if self.type == "any" else self.type)


class ToolUseChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None

    def to_choice(self) -> ToolChoice:
        return ToolChoice("named", self.name)


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonOutput(Body):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class UserMetadata(Body):
    user_id: Label | None = None


class Thread(Body):
    type: Literal["create", "continue"]
    previous_message_id: Label | None = None


_NO_THREAD = Failure(
    404,
    "invalid_request_error",
    "No conversation is held here between requests: send all of its messages.",
    "thread_not_found",
    "thread",
    figures={"details": {"error_code": "thread_not_found"}},
)
"""Clients send everything again when they read this code."""


def user_of_metadata(user_id: str) -> tuple[str, str]:
    """The user and the session in a `user_id`: agents write both into it. What is stored is the user's, because
    the next session begins with the same system prompt. Who names nothing but a session is alone in it."""
    user, _, session = user_id.partition("_session_")
    try:
        fields = json.loads(user_id)
    except ValueError:
        return user or user_id, session
    if not isinstance(fields, dict):
        return user_id, ""
    session = fields.pop("session_id", "")
    named = {key: value for key, value in fields.items() if value not in (None, "")}
    return json.dumps(named, sort_keys=True) if named else user_id, str(session)


# ── bodies ──


class CountBody(Body):
    """What makes the prompt."""

    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts = Field(default=[])
    tools: Annotated[list[Annotated[ToolParam, BeforeValidator(_own_only)]], Field(max_length=1024)] | None = None
    tool_choice: Annotated[AnyChoice | ToolUseChoice, BY_KIND] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None
    cache_control: CacheControl | None = None
    mcp_servers: Annotated[None, not_here("is not supported: let the client call these servers")] = None

    @property
    def omits_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def to_prompt(self) -> Request:
        """A request with this prompt and nothing else. Raises InvalidField where fields contradict each other."""
        tools, choice = tuple(tool.to_tool() for tool in self.tools or ()), self.tool_choice
        to_call = choice.to_choice() if choice else ToolChoice()
        check_choice(to_call, tools)
        turns = self._turns()
        last, breakpoints = turns.last, turns.breakpoints()
        return Request(
            messages=turns.messages(),
            tools=tools,
            tool_choice=to_call,
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            format=self._output_format(),
            template_args=self._template_args(),
            thinks_if_asked=self.thinking is None,
            reasoning=None if self._shows_thinking else ReasoningFormat.STRIP,
            continues=last is not None and last.role == "assistant" and bool(last.texts) and not last.calls,
            breakpoints=breakpoints,
            ttl=ttl_of(breakpoints),
        )

    def _output_format(self) -> JsonFormat | None:
        config = self.output_config
        form = (config and config.format) or self.output_format
        return JsonFormat(form.schema_, param="output_config.format") if form else None

    @property
    def _shows_thinking(self) -> bool:
        """Who does not ask for thinking does not expect it before the text."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def _template_args(self) -> dict[str, Json]:
        args: dict[str, Json] = {}
        if self.thinking is not None and self.thinking.type in _SWITCHES:
            args["enable_thinking"] = _SWITCHES[self.thinking.type]
        if self.output_config and (effort := self.output_config.effort):
            args["reasoning_effort"] = _EFFORTS.get(effort, effort)
        return args

    def _turns(self) -> _Turns:
        turns = _Turns()
        for tool in self.tools or ():
            turns.mark(tool.cache_control)
        turns.add("system", self.system)
        for index, message in enumerate(self.messages):
            if message.role == "user" and not any(block.says_something for block in message.content):
                raise InvalidField(f"messages[{index}].content", "is empty: give at least one block with a text.")
            turns.add(message.role, message.content)
        turns.mark(self.cache_control)
        return turns


class MessagesBody(GenerationFields, FormatFields, OwnerFields, RoomFields, CountBody):
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE]
    stop_sequences: Stops | None = None
    stream: bool | None = None
    metadata: UserMetadata | None = None
    thread: Thread | None = None
    compaction: Annotated[None, not_here("is not supported: old messages leave by themselves (evict)")] = None

    def to_request(self) -> Request:
        """Raises InvalidField where fields contradict each other, and Refused."""
        if self.thread is not None and self.thread.type == "continue":
            raise Refused(_NO_THREAD)
        prompt, owned = self.apply_to(self.to_prompt()), self.to_owned()
        form = self.to_format(prompt.format)
        if form is not None and prompt.continues:
            raise InvalidField(form.param, "goes without a last message of the assistant.")
        user, session = user_of_metadata((self.metadata and self.metadata.user_id) or "")
        user = owned.user or user
        return replace(
            prompt,
            user=user,
            namespace=private_namespace(user, self.cache_salt or ""),
            conversation_id=owned.conversation_id,
            cache_key=owned.cache_key or session or None,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or self.stop or ()),
            format=form,
            evict=self.evict,
            recall=self.to_recall(),
            # It is what the first event of a stream tells.
            want_progress=bool(self.stream),
        )


# ── from blocks to messages ──


@dataclass(slots=True)
class _Turn:
    """A message that is still being put together."""

    role: Role
    call_id: str | None = None
    tool: str | None = None
    parts: list[tuple[Ttl | None, str | None]] = field(default_factory=list)
    """Marks and texts in their order, as `breakpoints_in_text` reads them."""
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.parts if text is not None]

    def add(self, block: Block) -> None:
        if isinstance(block, ThinkingBlock):
            self.reasoning.append(block.to_reasoning())
        elif isinstance(block, ToolUseBlock):
            self.calls.append(block.to_call())
        else:
            self.parts += [(None, text) for text in block.texts()]
            self.images += block.images()

    def to_message(self) -> Message:
        return Message(
            role=self.role,
            content="\n".join(self.texts),
            reasoning="\n".join(filter(None, self.reasoning)),
            tool_calls=tuple(self.calls),
            tool_call_id=self.call_id,
            name=self.tool,
            images=tuple(self.images),
        )


class _Turns:
    """The messages of a conversation, and its breakpoints."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._before: list[Breakpoint] = []
        """Those before the first message."""
        self._names: dict[str, str] = {}
        """Tools by the ids of their calls."""

    @property
    def last(self) -> _Turn | None:
        return self._turns[-1] if self._turns else None

    def messages(self) -> tuple[Message, ...]:
        return tuple(turn.to_message() for turn in self._turns)

    def breakpoints(self) -> tuple[Breakpoint, ...]:
        turns = enumerate(self._turns, 1)
        return (*self._before, *(one for n, turn in turns for one in breakpoints_in_text(turn.parts, n)))

    def mark(self, control: CacheControl | None) -> None:
        if control is None:
            return
        if self._turns:
            self._turns[-1].parts.append((control.to_ttl(), None))
        else:
            self._before.append(Breakpoint(0, None, control.to_ttl()))

    def add(self, role: Role, blocks: Sequence[Block]) -> None:
        """Results stand before whatever else the user says: models know them right after their calls."""
        for block in sorted(blocks, key=lambda block: not isinstance(block, ResultBlock)):
            if isinstance(block, ResultBlock):
                turn = _Turn("tool", block.tool_use_id, self._names.get(block.tool_use_id))
                turn.parts, turn.images = [(None, block.text())], block.images()
                self._turns.append(turn)
            elif block.says_something:
                self._turn_of(role).add(block)
            if isinstance(block, ToolUseBlock):
                self._names[block.id] = block.name
            self.mark(block.cache_control)

    def _turn_of(self, role: Role) -> _Turn:
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_Turn(role))
        return self._turns[-1]
