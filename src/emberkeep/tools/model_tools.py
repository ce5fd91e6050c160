"""Other models as tools: a model asks another one for a second opinion."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from emberkeep.errors import ToolFailed
from emberkeep.tools.function import Answered, ToolFunction, as_tool, tool
from emberkeep.types.events import Caller
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Execution, Message, Request
from emberkeep.values import dataclass

GROUP = "models"

_TIMEOUT_S = 600.0
"""A model that thinks, or runs on a laptop, takes minutes."""
_MOST_IN_A_CHAIN = 1
"""A model that was asked by another one asks no third."""


@dataclass(frozen=True, slots=True)
class Consulted:
    """What another model answered, its tokens and its time."""

    text: str
    model: str
    """Its name at its service."""
    prompt_tokens: int
    completion_tokens: int
    ms: float


Consult = Callable[[RemoteModel, Request], Awaitable[Consulted]]
"""Asks it. May raise anything: only that call fails."""


class ModelTools:
    """One tool for each model."""

    def __init__(self, remotes: Sequence[RemoteModel], consult: Consult) -> None:
        self._remotes = remotes
        self._consult = consult

    def functions(self) -> list[ToolFunction]:
        return [self._function(remote) for remote in self._remotes]

    def _function(self, remote: RemoteModel) -> ToolFunction:
        async def ask(question: str, caller: Caller, context: str = "") -> Answered:
            return await self._ask(remote, question, context, caller)

        ask.__doc__ = _description(remote)
        return as_tool(tool(group=GROUP, name=f"ask_{remote.name}", timeout_s=_TIMEOUT_S)(ask))

    async def _ask(self, remote: RemoteModel, question: str, context: str, caller: Caller) -> Answered:
        if caller.depth >= _MOST_IN_A_CHAIN:
            raise ToolFailed(
                f"{remote.name} cannot be asked, because a model asked you: answer with what you know."
            )
        consulted = await self._consult(remote, _request(remote, question, context, caller))
        if not consulted.text.strip():
            raise ToolFailed(f"{remote.name} said nothing: ask in another way, or answer without it.")
        return Answered(f"{remote.name} says: {consulted.text}", _remark(remote, consulted))


def _description(remote: RemoteModel) -> str:
    is_what = f", {remote.model}" if remote.model else ""
    good_at = f" {remote.description.rstrip('.')}." if remote.description else ""
    return f"""Ask another model ({remote.name}{is_what}) for its opinion.{good_at}

    Args:
        question: What to ask. It knows nothing of this conversation.
        context: What it needs to know for that.
    """


def _request(remote: RemoteModel, question: str, context: str, caller: Caller) -> Request:
    text = f"{context}\n\n{question}" if context.strip() else question
    return Request(
        messages=(Message("user", text),),
        max_tokens=remote.max_tokens,
        execution=Execution(depth=caller.depth + 1, in_pieces=False),
    )


def _remark(remote: RemoteModel, consulted: Consulted) -> str:
    tokens = f"{consulted.prompt_tokens:,} + {consulted.completion_tokens:,} tokens"
    return f"{remote.name} ({consulted.model}), {tokens}, {consulted.ms / 1e3:.1f} s"
