"""Anthropic's Messages: the bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the answer.

A message of theirs is a list of blocks. Texts become one text, a line each, as the parts of OpenAI's messages do:
the same texts have the same tokens, whichever way they come. Neighbours of one role become one message, because
many templates want speakers to take turns.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from emberkeep.api.answer import Answer, BlockFrames, arguments_of, detail_json, timings_json, tool_json
from emberkeep.api.anthropic_blocks import Content, Texts, Turns, pack_reasoning, signature_of
from emberkeep.api.body import BY_KIND, INT32_MAX, WHOLE, Body, Count, Label, not_here
from emberkeep.api.errors import ANTHROPIC_ERRORS, Failure, Refused
from emberkeep.api.fields import (
    CacheControl,
    FormatFields,
    GenerationFields,
    OwnerFields,
    RoomFields,
    check_choice,
    ttl_of,
)
from emberkeep.api.kinds import Schema, Stops, ToolName
from emberkeep.api.openai_chat import MAX_MESSAGES
from emberkeep.errors import InvalidField
from emberkeep.types.events import (
    Accepted,
    CallEnded,
    CallStarted,
    Completed,
    Event,
    Finished,
    FinishReason,
    Progress,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
    merge_usage,
)
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import (
    Json,
    JsonFormat,
    ReasoningFormat,
    Request,
    Tool,
    ToolChoice,
)
from emberkeep.values import dataclass

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
        tools = tuple(Tool(one.name, one.description or "", one.input_schema) for one in self.tools or ())
        choice = self.tool_choice
        to_call = choice.to_choice() if choice else ToolChoice()
        check_choice(to_call, tools)
        turns = self._turns()
        last, breakpoints = turns.last, turns.breakpoints()
        form = (self.output_config and self.output_config.format) or self.output_format
        # Who does not ask for thinking does not expect it before the text.
        shows_thinking = self.thinking is not None and self.thinking.type != "disabled"
        return Request(
            messages=turns.messages(),
            tools=tools,
            tool_choice=to_call,
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            format=JsonFormat(form.schema_, param="output_config.format") if form else None,
            template_args=self._template_args(),
            thinks_if_asked=self.thinking is None,
            reasoning=None if shows_thinking else ReasoningFormat.STRIP,
            continues=last is not None and last.role == "assistant" and bool(last.texts) and not last.calls,
            breakpoints=breakpoints,
            ttl=ttl_of(breakpoints),
        )

    def _template_args(self) -> dict[str, Json]:
        args: dict[str, Json] = {}
        # Other kinds of thinking leave it to the model.
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            args["enable_thinking"] = self.thinking.type == "enabled"
        if self.output_config and (effort := self.output_config.effort):
            args["reasoning_effort"] = _EFFORTS.get(effort, effort)
        return args

    def _turns(self) -> Turns:
        turns = Turns()
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


# ── answers ──

_CUT = "max_tokens"
_FULL = "model_context_window_exceeded"
_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: _CUT, FinishReason.TOOL_CALLS: "tool_use"}


@dataclass(frozen=True, slots=True)
class MessageEnvelope:
    """What is known of a message before it is written."""

    id: str
    model: str
    conversation_id: str | None
    max_tokens: int
    omits_thinking: bool = False
    """The client does not want to see reasoning: its signature stands for it."""

    def message(self, content: list[Json], usage: Usage, ending: dict[str, Json]) -> dict[str, Json]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **ending,
            "usage": usage_json(usage),
        }

    def ending(self, finish: FinishReason | None, stop: str | None, completed: Completed) -> dict[str, Json]:
        """Why it ended. One that was cut before its limit has filled the context; not every service counts."""
        reason = _REASONS[finish] if finish else None
        limit = completed.fit.clamped_to or self.max_tokens
        if reason == _CUT and 0 < completed.usage.completion_tokens < limit:
            reason = _FULL
        is_stop = finish is FinishReason.STOP and stop is not None
        return {"stop_reason": "stop_sequence" if is_stop else reason, "stop_sequence": stop if is_stop else None}

    def thinking(self, reasoning: str) -> dict[str, Json]:
        signature = (pack_reasoning if self.omits_thinking else signature_of)(reasoning)
        return {"type": "thinking", "thinking": "" if self.omits_thinking else reasoning, "signature": signature}


def usage_json(usage: Usage) -> dict[str, Json]:
    """Every token of the prompt is read from the cache, or stored there because it stands before a breakpoint, or
    neither."""
    cached, created = usage.cached_tokens, usage.created_tokens
    for_long = max(usage.marked.long_tokens - cached, 0)
    return {
        "input_tokens": usage.prompt_tokens - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created - for_long,
            "ephemeral_1h_input_tokens": for_long,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "service_tier": "standard",
    }


# ── at once ──


def message_json(answer: Answer, envelope: MessageEnvelope) -> dict[str, Json]:
    (choice,), completed = answer.choices, answer.completed
    content: list[Json] = [envelope.thinking(choice.reasoning)] if choice.reasoning else []
    if choice.text:
        content.append({"type": "text", "text": choice.text})
    content += [
        _tool_use(call.id, call.name, arguments_of(call) or {}) for _, call in sorted(choice.calls.items())
    ]
    ending = envelope.ending(choice.finish, choice.stop, completed)
    return {**envelope.message(content, completed.usage, ending), **_beside(completed, envelope)}


def _tool_use(id: str, name: str, arguments: dict[str, Json]) -> dict[str, Json]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def _beside(completed: Completed, envelope: MessageEnvelope) -> dict[str, Json]:
    """What Anthropic's messages do not have: their clients pass it on unread."""
    return {
        "timings": timings_json(completed.timings),
        "emberkeep": detail_json(completed, envelope.conversation_id),
    }


# ── as a stream ──


class MessageFrames(BlockFrames):
    errors = ANTHROPIC_ERRORS

    def __init__(self, envelope: MessageEnvelope) -> None:
        super().__init__()
        self._envelope = envelope
        self._usage = Usage()
        """What is known so far."""
        self._blocks = 0
        self._open = ""
        """The type of the block that is being written; empty: none is."""
        self._reasoning = ""
        self._finished = Finished(0, FinishReason.STOP)
        self._completed: list[Completed] = []

    def frame(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._add("text", event.text)
            case ReasoningDelta():
                return self._think(event.text)
            case ToolCallDelta():
                return self._call(event)
            case Finished():
                self._finished = event
                return self._begin() + self._close()
            case Completed():
                self._completed.append(event)
            case Accepted():
                self._usage = Usage(event.prompt_tokens)
            case Progress():
                self._usage = Usage(event.total, cached_tokens=event.cached, marked=event.marked)
            case CallStarted() | CallEnded():
                return self._begin() + self._event("ping", emberkeep=tool_json(event))
        return b""

    def end(self) -> bytes:
        completed = merge_usage(self._completed)
        delta = self._envelope.ending(self._finished.reason, self._finished.stop, completed)
        beside = _beside(completed, self._envelope)
        last = self._event("message_delta", delta=delta, usage=usage_json(completed.usage), **beside)
        return self._begin() + self._close() + last + self._event("message_stop")

    def idle(self) -> bytes:
        return self._begin() + self._event("ping")

    # ── blocks ──

    def _beginning(self) -> bytes:
        not_yet = {"stop_reason": None, "stop_sequence": None}
        return self._event("message_start", message=self._envelope.message([], self._usage, not_yet))

    def _add(self, kind: str, text: str) -> bytes:
        """More of a text, which begins a block unless one of its kind is being written."""
        if not text:
            return b""
        begin = b"" if self._open == kind else self._start(kind, {"type": kind, kind: ""})
        return begin + self._piece(text)

    def _think(self, text: str) -> bytes:
        """Reasoning that the client does not want to see still opens a block: its signature follows."""
        self._reasoning += text
        if not self._envelope.omits_thinking:
            return self._add("thinking", text)
        return b"" if self._open == "thinking" else self._start("thinking", {"type": "thinking", "thinking": ""})

    def _call(self, event: ToolCallDelta) -> bytes:
        begin = b""
        if event.id is not None or event.name is not None:
            begin = self._start("tool_use", _tool_use(event.id or "", event.name or "", {}))
        return begin + self._piece(event.arguments)

    def _start(self, kind: str, block: dict[str, Json]) -> bytes:
        """Close what is open and begin another block. The first one is followed by a ping, as clients know it."""
        before, index = self._begin() + self._close(), self._blocks
        self._open, self._blocks = kind, index + 1
        name, key = _DELTAS[kind]
        self._open_delta("content_block_delta", index=index, delta={"type": name, key: "\0"})
        signed = {**block, "signature": ""} if kind == "thinking" else block
        ping = b"" if index else self._event("ping")
        return before + self._event("content_block_start", index=index, content_block=signed) + ping

    def _close(self) -> bytes:
        kind, self._open, index = self._open, "", self._blocks - 1
        stop = self._event("content_block_stop", index=index) if kind else b""
        if kind != "thinking":
            return stop
        signature, self._reasoning = self._envelope.thinking(self._reasoning)["signature"], ""
        delta = {"type": "signature_delta", "signature": signature}
        return self._event("content_block_delta", index=index, delta=delta) + stop


_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
