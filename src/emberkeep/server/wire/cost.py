"""What a request cost, in OpenAI's, llama.cpp's and our own words."""

from __future__ import annotations

from dataclasses import asdict

from emberkeep.types import (
    CallEnded,
    CallStarted,
    Completed,
    Divergence,
    Fit,
    Json,
    LookupRecord,
    Timings,
    Usage,
)


def usage_json(usage: Usage) -> dict[str, Json]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def timings_json(timings: Timings) -> dict[str, Json]:
    return {
        "cache_n": timings.cache_n,
        "prompt_n": timings.prompt_n,
        "prompt_ms": timings.prompt_ms,
        "prompt_per_second": timings.prompt_per_second,
        "predicted_n": timings.predicted_n,
        "predicted_ms": timings.predicted_ms,
        "predicted_per_second": timings.predicted_per_second,
    }


def lookup_json(lookup: LookupRecord) -> dict[str, Json]:
    return {
        "reused": {"hot": lookup.hot_tokens, "warm": lookup.warm_tokens, "cold": lookup.cold_tokens},
        "moved_tokens": lookup.moved_tokens,
        "repaired_tokens": lookup.repaired_tokens,
        "approximate": lookup.is_approximate,
        "reason": lookup.reason,
        "divergence": _divergence_json(lookup.divergence) if lookup.divergence else None,
    }


def _divergence_json(divergence: Divergence) -> dict[str, Json]:
    return {**asdict(divergence), "where": divergence.where or None}


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
    return told


def detail_json(completed: Completed, conversation_id: str | None) -> dict[str, Json]:
    """The `emberkeep` object: what was reused, from where, and why not more."""
    lookup, timings = completed.lookup, completed.timings
    return {
        **lookup_json(lookup),
        "load_ms": lookup.load_ms,
        "ttft_ms": timings.ttft_ms,
        "queue_ms": timings.queue_ms,
        **_fit_json(completed.fit),
        "conversation_id": conversation_id,
        **({"answered_by": completed.answered_by} if completed.answered_by else {}),
    }


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
