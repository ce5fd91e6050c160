"""What a chat says about an answer, beside the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from emberkeep.cli.tables import counted
from emberkeep.errors import ContextExceeded, EmberkeepError
from emberkeep.types import FinishReason

if TYPE_CHECKING:
    from emberkeep.library import Result


_FULL = 0.9


def stats_line(result: Result, max_tokens: int | None, context: int) -> str:
    return " · ".join(_parts(result, max_tokens, context))


def _parts(result: Result, max_tokens: int | None, context: int) -> Iterator[str]:
    usage = result.usage
    yield f"reused {usage.cached_tokens}/{usage.prompt_tokens} tokens"
    yield f"first token {result.ttft_ms:.0f} ms"
    yield f"{usage.completion_tokens} tokens at {result.timings.predicted_per_second:.0f}/s"
    if left := sum(eviction.messages for eviction in result.evictions):
        archived = " (archived)" if all(eviction.archived for eviction in result.evictions) else ""
        yield f"{counted(left, 'message', 'messages')} left the context{archived}"
    if result.recalled:
        yield f"recalled {result.recalled}"
    if result.finish_reason is FinishReason.LENGTH:
        if usage.completion_tokens == max_tokens:
            yield "cut at --max-tokens"
        elif result.exchanges and usage.total_tokens < _FULL * context:
            yield "cut after as many rounds of tools as tool_turns allows"
        else:
            yield f"the context of {context} tokens is full, /clear begins anew"


def archive_warning(result: Result) -> str | None:
    """Where something left the context that should have been archived and was not."""
    error = next((eviction.error for eviction in result.evictions if eviction.error), None)
    return f"What left the context was not archived: {error}" if error else None


def advice(error: EmberkeepError, *, evicts: bool) -> str:
    """What is wrong, and what can be done about it in a chat."""
    if not isinstance(error, ContextExceeded):
        return str(error)
    too_much = f"The context holds {error.context} tokens and this would make it {error.prompt_tokens}: "
    if evicts:
        return f"{too_much}say it in fewer words, a larger --ctx holds more."
    return f"{too_much}/clear begins anew, a larger --ctx holds more, --evict lets old messages leave."
