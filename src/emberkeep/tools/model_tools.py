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
    """One tool for each model. `depth_limit`: how many models may ask one another in a chain."""

    def __init__(self, remotes: Sequence[RemoteModel], consult: Consult, depth_limit: int) -> None:
        self._remotes = remotes
        self._consult = consult
        self._depth_limit = depth_limit

    def functions(self) -> list[ToolFunction]:
        """None where no model may ask another."""
        return [self._function(remote) for remote in self._remotes] if self._depth_limit else []

    def _function(self, remote: RemoteModel) -> ToolFunction:
        async def ask(question: str, caller: Caller, context: str = "") -> Answered:
            return await self._ask(remote, question, context, caller)

        ask.__doc__ = _description(remote)
        return as_tool(tool(group=GROUP, name=f"ask_{remote.name}", timeout_s=_TIMEOUT_S)(ask))

    async def _ask(self, remote: RemoteModel, question: str, context: str, caller: Caller) -> Answered:
        if caller.depth >= self._depth_limit:
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
