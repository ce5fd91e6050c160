"""An answer as clients get it: all at once as JSON, or as server-sent events, and what it cost.

The token path is string concatenation around one escaped text: the JSON before and after it is built once
per choice. JSON is written in ASCII because some clients take U+2028 inside a text for the end of a line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, field
from typing import Protocol, TypeVar

from emberkeep.api.call_shape import TOOL_CALLS, CallShape, StreamedCalls
from emberkeep.api.errors import OPENAI_ERRORS, Failure, sse
from emberkeep.types.events import (
    CallEnded,
    CallStarted,
    Completed,
    Divergence,
    Event,
    Finished,
    FinishReason,
    Fit,
    Loading,
    LookupRecord,
    PermissionAsked,
    Progress,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
    merge_usage,
)
from emberkeep.types.request import Json, ToolCall
from emberkeep.values import dataclass

DONE = b"data: [DONE]\n\n"

ChoiceEvent = TextDelta | ReasoningDelta | ToolCallDelta | Finished


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one answer has in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    conversation_id: str | None

    def head(self, kind: str) -> dict[str, Json]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


# ── at once ──


@dataclass(slots=True)
class ChoiceAnswer:
    """What has come of one choice."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    logprobs_start: int = 0
    """Characters of `text` before the first token with a log probability; an echoed prompt has none of these."""
    tokens: list[int] = field(default_factory=list)
    """Ids behind the text, where it is as it was sampled."""
    finish: FinishReason | None = None
    stop: str | None = None
    """The stop string that ended it."""

    def add(self, event: ChoiceEvent) -> None:
        match event:
            case TextDelta():
                self._add_text(event)
            case ReasoningDelta():
                self.reasoning += event.text
            case ToolCallDelta():
                self.calls[event.call_index] = event.added_to(self.calls.get(event.call_index))
            case Finished():
                self.finish, self.stop = event.reason, event.stop

    def message(self, calls: CallShape) -> dict[str, Json]:
        message: dict[str, Json] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.text or None
            message |= calls.in_message([call for _, call in sorted(self.calls.items())])
        return message

    def _add_text(self, delta: TextDelta) -> None:
        if not self.logprobs:
            self.logprobs_start = len(self.text)
        self.text += delta.text
        self.logprobs.extend(delta.logprobs)
        self.tokens.extend(delta.tokens)


class _Scored(Protocol):
    @property
    def logprobs(self) -> Sequence[TokenLogprob]: ...


S = TypeVar("S", bound=_Scored)


def likeliest(choices: Iterable[S], kept: int) -> list[S]:
    """The best first: those whose tokens have the highest mean log probability. Of none it is the highest."""

    def mean(choice: S) -> float:
        return sum(token.logprob for token in choice.logprobs) / max(len(choice.logprobs), 1)

    return sorted(choices, key=mean, reverse=True)[:kept]


class Answer:
    """All events of one HTTP request, in order of arrival."""

    def __init__(self, choices: int) -> None:
        self.choices = [ChoiceAnswer() for _ in range(choices)]
        self._completed: list[Completed] = []
        self._called: list[CallEnded] = []

    @property
    def completed(self) -> Completed:
        """What it cost; there when every event has come."""
        return merge_usage(self._completed)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case TextDelta() | ReasoningDelta() | ToolCallDelta() | Finished():
                    self.choices[event.index].add(event)
                case Completed():
                    self._completed.append(event)
                case CallEnded():
                    self._called.append(event)

    def keep_best(self, tried: int, kept: int, *, with_logprobs: bool) -> None:
        """Of each `tried` choices, which belong to one prompt, the `kept` likeliest, the best first."""
        groups = [self.choices[start : start + tried] for start in range(0, len(self.choices), tried)]
        self.choices = [choice for group in groups for choice in likeliest(group, kept)]
        if not with_logprobs:
            for choice in self.choices:
                choice.logprobs.clear()

    def chat_json(self, envelope: Envelope, calls: CallShape = TOOL_CALLS) -> dict[str, Json]:
        choices = [
            {
                "index": index,
                "message": choice.message(calls),
                "logprobs": chat_logprobs(choice.logprobs),
                "finish_reason": calls.finish(choice.finish),
            }
            for index, choice in enumerate(self.choices)
        ]
        return self._wrap(envelope, "chat.completion", choices)

    def text_json(self, envelope: Envelope) -> dict[str, Json]:
        choices = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": text_logprobs(choice.logprobs, choice.logprobs_start),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(self.choices)
        ]
        return self._wrap(envelope, "text_completion", choices)

    def _wrap(self, envelope: Envelope, kind: str, choices: list[dict[str, Json]]) -> dict[str, Json]:
        completed = self.completed
        return envelope.head(kind) | {
            "choices": choices,
            "usage": usage_json(completed.usage),
            "timings": timings_json(completed.timings),
            "emberkeep": self._detail(completed, envelope.conversation_id),
        }

    def _detail(self, completed: Completed, conversation_id: str | None) -> dict[str, Json]:
        told = detail_json(completed, conversation_id)
        return {**told, "tools": [tool_json(event)["tool"] for event in self._called]} if self._called else told


# ── as a stream ──


class Frames(Protocol):
    """Stateful: one object per stream, fed in order."""

    media_type: str

    def frame(self, event: Event) -> bytes:
        """What to send for `event`; empty for what the stream does not show (yet)."""

    def end(self) -> bytes:
        """Everything after the last event, [DONE] included."""

    def idle(self) -> bytes:
        """What tells the client, after seconds of silence, that its answer is still to come; empty: nothing."""

    def failure(self, failure: Failure, request_id: str) -> bytes:
        """What a stream ends with that failed."""


class SseFrames:
    """Server-sent events: what they have in common."""

    media_type = "text/event-stream"

    def idle(self) -> bytes:
        return b": the answer is being computed\n\n"

    def failure(self, failure: Failure, request_id: str) -> bytes:
        return OPENAI_ERRORS.frame(failure, request_id)


def loading_comment(event: Loading) -> bytes:
    """A comment and no event: clients read chunks of an answer only."""
    done = "" if event.fraction is None else f", {event.fraction:.0%}"
    return f": {json.dumps(event.model)} is being loaded{done}\n\n".encode()


class _Chunks:
    """The JSON around a choice."""

    def __init__(self, envelope: Envelope, kind: str, include_usage: bool) -> None:
        self._envelope = envelope
        self._include_usage = include_usage
        self._completed: list[Completed] = []
        self.head = envelope.head(kind)
        # OpenAI: when usage was asked for, every chunk but the last has it as null.
        self.rest: dict[str, Json] = {"usage": None} if include_usage else {}

    def chunk(self, choices: Sequence[Json], **extra: Json) -> bytes:
        return sse(self.head | {"choices": choices} | self.rest | extra)

    def around(self, choice: dict[str, Json]) -> tuple[bytes, bytes]:
        """Everything before and after the text in the chunk of `choice`, whose text is a marker."""
        before, _, after = self.chunk([choice]).rpartition(_MARKER)  # a model's name, before it, may be any text
        return before, after

    def progress(self, choice: Json, event: Progress) -> bytes:
        spent = {"total": event.total, "cache": event.cached, "processed": event.processed}
        return self.chunk([choice], prompt_progress=spent | {"time_ms": event.elapsed_ms})

    def aside(self, choice: Json, detail: Json) -> bytes:
        """A frame for something that happens beside the answer, such as a tool call."""
        return b"event: emberkeep\n" + self.chunk([choice], emberkeep=detail)

    def keep(self, event: Completed) -> bytes:
        self._completed.append(event)
        return b""

    def end(self, empty_choice: Json) -> bytes:
        """OpenAI's clients do not look at event names: to them the detail is one more chunk, without text."""
        completed = merge_usage(self._completed)
        timings = timings_json(completed.timings)
        detail = detail_json(completed, self._envelope.conversation_id)
        frames = b"event: emberkeep\n" + self.chunk([empty_choice], timings=timings, emberkeep=detail)
        if self._include_usage:
            frames += self.chunk([], usage=usage_json(completed.usage), timings=timings)
        return frames + DONE


_MARKER = json.dumps("\0").encode()


class ChatFrames(SseFrames):
    def __init__(self, envelope: Envelope, include_usage: bool, calls: CallShape = TOOL_CALLS) -> None:
        self._calls = StreamedCalls(calls)
        self._chunks = _Chunks(envelope, "chat.completion.chunk", include_usage)
        self._started: set[int] = set()
        self._around: dict[tuple[int, str], tuple[bytes, bytes]] = {}

    def frame(self, event: Event) -> bytes:
        if type(event) is TextDelta:
            return self._piece(event.index, "content", event.text, event.logprobs)
        match event:
            case ReasoningDelta():
                return self._piece(event.index, "reasoning_content", event.text)
            case ToolCallDelta():
                return b"".join(self._delta(event.index, delta) for delta in self._calls.deltas(event))
            case Finished():
                rest = b"".join(self._delta(event.index, delta) for delta in self._calls.rest(event.index))
                return rest + self._delta(event.index, {}, finish=self._calls.shape.finish(event.reason))
            case Loading():
                return loading_comment(event)
            case Progress():
                return self._chunks.progress(_chat_choice(0, {}), event)
            case Completed():
                return self._chunks.keep(event)
            case CallStarted() | CallEnded():
                return self._chunks.aside(_chat_choice(0, {}), tool_json(event))
            case PermissionAsked():
                return self._chunks.aside(_chat_choice(0, {}), question_json(event))
        return b""

    def end(self) -> bytes:
        return self._chunks.end(_chat_choice(0, {}))

    def _piece(self, index: int, key: str, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        if not text and not logprobs:
            return b""
        if logprobs or index not in self._started:
            return self._delta(index, {key: text}, chat_logprobs(logprobs))
        around = self._around.get((index, key))
        if around is None:
            around = self._chunks.around(_chat_choice(index, {key: "\0"}))
            self._around[index, key] = around
        return around[0] + json.dumps(text).encode() + around[1]

    def _delta(self, index: int, delta: Json, logprobs: Json = None, finish: str | None = None) -> bytes:
        """The first delta of a choice also says the role: a frame of its own would only cost time."""
        if index not in self._started:
            self._started.add(index)
            delta = {"role": "assistant", "content": "" if finish else None} | delta
        return self._chunks.chunk([_chat_choice(index, delta, logprobs, finish)])


def _chat_choice(index: int, delta: Json, logprobs: Json = None, finish: str | None = None) -> dict[str, Json]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


class TextFrames(SseFrames):
    def __init__(self, envelope: Envelope, include_usage: bool) -> None:
        self._chunks = _Chunks(envelope, "text_completion", include_usage)
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._offsets: dict[int, int] = {}

    def frame(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._piece(event)
            case Finished():
                return self._chunks.chunk([_text_choice(event.index, "", finish=event.reason)])
            case Loading():
                return loading_comment(event)
            case Progress():
                return self._chunks.progress(_text_choice(0, ""), event)
            case Completed():
                return self._chunks.keep(event)
        return b""

    def end(self) -> bytes:
        return self._chunks.end(_text_choice(0, ""))

    def _piece(self, event: TextDelta) -> bytes:
        offset = self._offsets.get(event.index, 0)
        self._offsets[event.index] = offset + len(event.text)
        if event.logprobs:
            logprobs = text_logprobs(event.logprobs, offset)
            return self._chunks.chunk([_text_choice(event.index, event.text, logprobs)])
        return self._plain(event) if event.text else b""

    def _plain(self, event: TextDelta) -> bytes:
        around = self._around.get(event.index)
        if around is None:
            around = self._around[event.index] = self._chunks.around(_text_choice(event.index, "\0"))
        return around[0] + json.dumps(event.text).encode() + around[1]


def _text_choice(index: int, text: str, logprobs: Json = None, finish: Json = None) -> dict[str, Json]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


# ── log probabilities ──

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    """None when there are none."""
    if not tokens:
        return None
    content = [_entry(token) | {"top_logprobs": [_entry(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> Json:
    """`offset`: characters of this choice's text that came before these tokens."""
    if not tokens:
        return None
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(_text(token))
    return {
        "tokens": [_text(token) for token in tokens],
        "token_logprobs": [None if math.isnan(token.logprob) else _finite(token) for token in tokens],
        "top_logprobs": [_likeliest(token) for token in tokens],
        "text_offset": offsets,
    }


def _likeliest(token: TokenLogprob) -> Json:
    if math.isnan(token.logprob):
        return None
    return {_text(other): _finite(other) for other in token.top}


def _entry(token: TokenLogprob) -> dict[str, Json]:
    return {"token": _text(token), "logprob": _finite(token), "bytes": list(token.piece)}


def _text(token: TokenLogprob) -> str:
    return token.piece.decode("utf-8", "replace")


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, _LOWEST)


# ── what it cost ──


def usage_json(usage: Usage) -> dict[str, Json]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            **({"cache_write_tokens": usage.created_tokens} if usage.marked.tokens else {}),
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def timings_json(timings: Timings) -> dict[str, Json]:
    """Drafts are told where there were some, as llama.cpp's server does."""
    drafts = {"draft_n": timings.draft_n, "draft_n_accepted": timings.draft_n_accepted}
    return {
        "cache_n": timings.cache_n,
        "prompt_n": timings.prompt_n,
        "prompt_ms": timings.prompt_ms,
        "prompt_per_second": timings.prompt_per_second,
        "predicted_n": timings.predicted_n,
        "predicted_ms": timings.predicted_ms,
        "predicted_per_second": timings.predicted_per_second,
        **(drafts if timings.draft_n else {}),
    }


def lookup_json(lookup: LookupRecord) -> dict[str, Json]:
    return {
        "reused": {
            "hot": lookup.hot_tokens,
            "warm": lookup.warm_tokens,
            "cold": lookup.cold_tokens,
            "remote": lookup.remote_tokens,
        },
        "moved_tokens": lookup.moved_tokens,
        "repaired_tokens": lookup.repaired_tokens,
        "approximate": lookup.is_approximate,
        "reason": lookup.reason,
        "divergence": _divergence_json(lookup.divergence) if lookup.divergence else None,
        "sources": [{"from": part.source, "tokens": part.tokens} for part in lookup.sources],
    }


def _divergence_json(divergence: Divergence) -> dict[str, Json]:
    told = {**asdict(divergence), "where": divergence.where or None, "volatile": list(divergence.volatile)}
    return told if divergence.volatile else {key: value for key, value in told.items() if key != "volatile"}


def _fit_json(fit: Fit) -> dict[str, Json]:
    plan = {**asdict(fit.plan), "predicted_bytes": fit.predicted_bytes} if fit.plan else None
    told: dict[str, Json] = {
        "plan": plan,
        "truncated_tokens": fit.truncated_tokens,
        "truncated_messages": fit.truncated_messages,
    }
    if fit.evictions:
        told["evictions"] = [asdict(eviction) for eviction in fit.evictions]
    if fit.recalled:
        told["recalled"] = fit.recalled
    if fit.clamped_to is not None:
        told["clamped_max_tokens"] = fit.clamped_to
    return told


def detail_json(completed: Completed, conversation_id: str | None) -> dict[str, Json]:
    """The `emberkeep` object: what was reused, from where, and why not more."""
    lookup, timings = completed.lookup, completed.timings
    return {
        **lookup_json(lookup),
        "load_ms": lookup.load_ms,
        "ttft_ms": timings.ttft_ms,
        "queue_ms": timings.queue_ms,
        "saved_ms": timings.saved_ms,
        **_fit_json(completed.fit),
        "conversation_id": conversation_id,
        **({"answered_by": completed.answered_by} if completed.answered_by else {}),
        **({"hygiene": list(completed.hygiene)} if completed.hygiene else {}),
    }


def question_json(asked: PermissionAsked) -> dict[str, Json]:
    """A call that waits for `POST /v1/tools/decisions`."""
    call = asked.call
    told = {"id": asked.id, "group": asked.group, "name": call.name, "arguments": call.arguments}
    return {"permission": {**told, "call_id": call.id}}


def tool_json(event: CallStarted | CallEnded) -> dict[str, Json]:
    """A tool that the server ran by itself."""
    if isinstance(event, CallStarted):
        call = event.call
        return {"tool": {"id": call.id, "name": call.name, "arguments": call.arguments, "state": "started"}}
    outcome = event.outcome
    call = outcome.call
    told = {"id": call.id, "name": call.name, "arguments": call.arguments}
    state = "failed" if outcome.failed else "done"
    return {
        "tool": {
            **told,
            "state": state,
            "result": outcome.text,
            "ms": outcome.ms,
            "remark": outcome.remark or None,
        }
    }
