"""What the model is told about messages that it does not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import localtime, strftime

from emberkeep.types import Recall, Recollection

_HOW = {
    Recall.OFF: "they are archived",
    Recall.TOOL: "the tool search_memory finds them",
    Recall.AUTO: "what matters of them is quoted where it is needed",
}


def notice(count: int, recall: Recall, *, is_archived: bool) -> str:
    how = _HOW[recall] if is_archived else "they cannot be read any more"
    messages = "message of this conversation has" if count == 1 else "messages of this conversation have"
    return f"[{count} earlier {messages} left the context: {how}.]\n\n"


def quoted(found: Sequence[Recollection]) -> str:
    """What stands before the user's message for what was recalled."""
    return f"[Earlier in this conversation:\n{listed(found)}]\n\n"


def listed(found: Sequence[Recollection]) -> str:
    return "".join(_entry(one) for one in found)


def _entry(found: Recollection) -> str:
    when = strftime("%Y-%m-%d", localtime(found.at))
    said = [("user", found.user_text), ("assistant", found.assistant_text)]
    said += [(f"tool {use.name}({use.arguments})", use.result) for use in found.tool_uses]
    return "".join(f"{when} {who}: {text.strip()}\n" for who, text in said if text.strip())


def fitting(found: Sequence[Recollection], room: int, count: Callable[[str], int]) -> list[Recollection]:
    """As many as fit, the best first; of one that is too long the passage that matched."""
    taken: list[Recollection] = []
    for one in found:
        passage = replace(one, user_text=one.highlight.replace("**", ""), assistant_text="", tool_uses=())
        for candidate in (one, passage):
            if count(quoted([*taken, candidate])) <= room:
                taken.append(candidate)
                break
    return taken
