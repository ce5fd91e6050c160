"""Tool calls in a chat: shown as they happen, and asked about where they can do harm."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from emberkeep.cli.tables import printable
from emberkeep.types import CallEnded, CallStarted, Decision, Outcome, PermissionAsked, ToolCall

if TYPE_CHECKING:
    from emberkeep.library.tool_session import ToolSession

_ARGUMENT_CHARS = 60
_CALL_CHARS = 160
_RESULT_CHARS = 100
_WHOLE = 10**6
_QUESTION = "Allow? [y]es, [n]o, [a]lways or ne[v]er in this session: "
_ANSWERS = {
    **dict.fromkeys(("y", "yes", "o", "once"), Decision.ONCE),
    **dict.fromkeys(("n", "no"), Decision.NO),
    **dict.fromkeys(("a", "always"), Decision.ALWAYS),
    **dict.fromkeys(("v", "never"), Decision.NEVER),
}


class CallView:
    """`tell`: a remark to the person; `ask`: a question, answered with a line."""

    def __init__(self, acting: ToolSession | None, tell: Callable[[str], None], ask: Callable[[str], str]) -> None:
        self._acting = acting
        self._tell = tell
        self._ask = ask

    def show(self, event: CallStarted | CallEnded | PermissionAsked) -> None:
        """Blocks while somebody decides."""
        if isinstance(event, CallStarted):
            self._tell(f"→ {call_line(event.call)}")
        elif isinstance(event, CallEnded):
            self._tell(f"  {_outcome_line(event.outcome)}")
        else:
            self._decide(event.call)

    def _decide(self, call: ToolCall) -> None:
        """Where the question is interrupted nothing is decided: that ends the answer, and so the call."""
        self._tell(f"? {call_line(call, whole=True)}")
        decision = self._asked()
        if self._acting is not None:
            self._acting.decide(call, decision)

    def _asked(self) -> Decision:
        while True:
            try:
                answer = self._ask(_QUESTION).strip().lower()
            except EOFError:
                return Decision.NO
            if answer in _ANSWERS:
                return _ANSWERS[answer]


def ask_aloud(question: str) -> str:
    """On stderr: the output may be a pipe. Raises EOFError."""
    print(question, end="", file=sys.stderr, flush=True)
    return input()


def call_line(call: ToolCall, *, whole: bool = False) -> str:
    """`read_file(path="notes.txt")`. `whole`: nothing is left out, for somebody who has to decide."""
    try:
        given = json.loads(call.arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        given = None
    of_an_argument, of_all = (_WHOLE, _WHOLE) if whole else (_ARGUMENT_CHARS, _CALL_CHARS)
    if not isinstance(given, dict):
        return _short(f"{call.name}({call.arguments})", of_all)
    told = (
        f"{key}={_short(json.dumps(value, ensure_ascii=False), of_an_argument)}" for key, value in given.items()
    )
    return _short(f"{call.name}({', '.join(told)})", of_all)


def _outcome_line(outcome: Outcome) -> str:
    took = f"{outcome.ms:.0f} ms" if outcome.ms < 1000 else f"{outcome.ms / 1e3:.1f} s"
    if outcome.failed:
        return f"✗ {_short(outcome.text, _RESULT_CHARS)} · {took}"
    said = _short(outcome.remark or outcome.text, _RESULT_CHARS) or "nothing"
    return f"✓ {said} · {took}"


def _short(text: str, chars: int) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= chars else f"{line[: chars - 2]} …"
