"""An answer as clients get it: all at once as JSON, or as server-sent events, and what it cost.

The token path is string concatenation around one escaped text: the JSON before and after it is built once
per choice. JSON is written in ASCII because some clients take U+2028 inside a text for the end of a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, field
from typing import Protocol, TypeVar

from emberkeep.api.errors import OPENAI_ERRORS, ErrorShape, Failure, sse
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

ChoiceEvent = TextDelta | ReasoningDelta | ToolCallDelta | Finished


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

    def _add_text(self, delta: TextDelta) -> None:
        if not self.logprobs:
            self.logprobs_start = len(self.text)
        self.text += delta.text
        self.logprobs.extend(delta.logprobs)
        self.tokens.extend(delta.tokens)


def arguments_of(call: ToolCall) -> dict[str, Json] | None:
    """None where the model was cut off before its arguments were whole."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


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
        """Keeps the `kept` likeliest of each `tried` choices, which belong to one prompt, the best first."""
        groups = [self.choices[start : start + tried] for start in range(0, len(self.choices), tried)]
        self.choices = [choice for group in groups for choice in likeliest(group, kept)]
        if not with_logprobs:
            for choice in self.choices:
                choice.logprobs.clear()

    def detail_json(self, conversation_id: str | None) -> dict[str, Json]:
        return detail_json(self.completed, conversation_id, self._called)


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
    names = _TIMED + (_DRAFTED if timings.draft_n else ())
    return {name: getattr(timings, name) for name in names}


_PREDICTED = ("predicted_n", "predicted_ms", "predicted_per_second")
_TIMED = ("cache_n", "prompt_n", "prompt_ms", "prompt_per_second", *_PREDICTED)
_DRAFTED = ("draft_n", "draft_n_accepted")


def progress_json(event: Progress) -> dict[str, Json]:
    return {
        "total": event.total,
        "cache": event.cached,
        "processed": event.processed,
        "time_ms": event.elapsed_ms,
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
    fields = {**asdict(divergence), "where": divergence.where or None, "volatile": list(divergence.volatile)}
    return fields if divergence.volatile else {key: value for key, value in fields.items() if key != "volatile"}


def _fit_json(fit: Fit) -> dict[str, Json]:
    return {
        "plan": {**asdict(fit.plan), "predicted_bytes": fit.predicted_bytes} if fit.plan else None,
        "truncated_tokens": fit.truncated_tokens,
        "truncated_messages": fit.truncated_messages,
        **({"evictions": [asdict(eviction) for eviction in fit.evictions]} if fit.evictions else {}),
        **({"recalled": fit.recalled} if fit.recalled else {}),
        **({"clamped_max_tokens": fit.clamped_to} if fit.clamped_to is not None else {}),
    }


def detail_json(
    completed: Completed, conversation_id: str | None, ran: Sequence[CallEnded] = ()
) -> dict[str, Json]:
    """The `emberkeep` object: what was reused, from where, and why not more, and the tools that `ran` here."""
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
        **({"tools": [tool_json(event)["tool"] for event in ran]} if ran else {}),
    }


def question_json(question: PermissionAsked) -> dict[str, Json]:
    """A call that waits for `POST /v1/tools/decisions`."""
    call = question.call
    about = {"id": question.id, "group": question.group, "name": call.name, "arguments": call.arguments}
    return {"permission": {**about, "call_id": call.id}}


def tool_json(event: CallStarted | CallEnded) -> dict[str, Json]:
    """A tool that the server ran by itself."""
    call = event.call if isinstance(event, CallStarted) else event.outcome.call
    about = {"id": call.id, "name": call.name, "arguments": call.arguments}
    if isinstance(event, CallStarted):
        return {"tool": {**about, "state": "started"}}
    outcome = event.outcome
    result = {"result": outcome.text, "ms": outcome.ms, "remark": outcome.remark or None}
    return {"tool": {**about, "state": "failed" if outcome.failed else "done", **result}}


MARKER = json.dumps("\0").encode()
"""Stands for a text in JSON that is written once, around many texts."""


class Frames:
    """An answer as a stream: server-sent events, unless it says. Stateful: one per stream, fed in order."""

    media_type = "text/event-stream"
    errors: ErrorShape = OPENAI_ERRORS

    def frame(self, event: Event) -> bytes:
        """What to send for `event`; empty for what the stream does not show (yet)."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Everything after the last event, [DONE] included."""
        return b""

    def idle(self) -> bytes:
        """What tells the client, after seconds of silence, that its answer is still to come; empty: nothing."""
        return b": the answer is being computed\n\n"

    def failure(self, failure: Failure, request_id: str) -> bytes:
        """What a stream ends with that failed."""
        return self.errors.frame(failure, request_id)


class BlockFrames(Frames):
    """A stream of numbered blocks, one after the other: each is opened, filled piece by piece, and closed.

    Every event says its type twice, as Anthropic's and OpenAI's newer clients want it.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self._around: list[bytes] = []
        """The JSON before, between and after what differs in the deltas of the open block."""

    def _event(self, kind: str, **fields: Json) -> bytes:
        return sse({"type": kind, **fields}, kind)

    def _beginning(self) -> bytes:
        """The events before the first block."""
        raise NotImplementedError

    def _begin(self) -> bytes:
        """`_beginning`, once."""
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._beginning()

    def _open_delta(self, kind: str, **fields: Json) -> None:
        """Prepares the deltas of a block that is opened. What will differ is a marker in `fields`."""
        self._around = sse({"type": kind, **fields}, kind).split(MARKER)

    def _piece(self, text: str) -> bytes:
        """One delta."""
        return self._around[0] + json.dumps(text).encode() + self._around[1]


def loading_comment(event: Loading) -> bytes:
    """A comment and no event: clients read chunks of an answer only."""
    done = "" if event.fraction is None else f", {event.fraction:.0%}"
    return f": {json.dumps(event.model)} is being loaded{done}\n\n".encode()
