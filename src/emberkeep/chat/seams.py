"""Control tokens are the template's to write: what users and tools say stays text, whatever it looks like.

A file that holds `<|im_end|>` and a forged system message after it would otherwise end the message that quotes it.
A seam is set inside of each such text, and the tokenizer begins anew there (`chat/tokens.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from emberkeep.chat.template import NO_ARGS, ChatTemplate
from emberkeep.chat.tokens import SEAM
from emberkeep.types import Json, Message, Tool, Vocab
from emberkeep.types.alternatives import alternatives

_QUOTED = ("user", "tool")
"""Who speaks for others. The system's words are the owner's, and an assistant's are the model's own tokens."""


class SeamedTemplate:
    """A template for one vocabulary. May be used from any thread."""

    def __init__(self, template: ChatTemplate, vocab: Vocab) -> None:
        self._template = template
        self._controls = alternatives(text for text, token in vocab.specials.items() if token in vocab.controls)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        args: Mapping[str, Json] = NO_ARGS,
    ) -> str:
        """As `ChatTemplate.render`, with seams."""
        return self._template.render(
            [self._message(message) for message in messages],
            [self._tool(tool) for tool in tools],
            add_generation_prompt=add_generation_prompt,
            args=args,
        )

    def _message(self, message: Message) -> Message:
        if message.role not in _QUOTED or not self._has_control(message.content):
            return message
        return replace(message, content=self._seamed(message.content))

    def _tool(self, tool: Tool) -> Tool:
        """Descriptions of tools come from other servers too."""
        written = json.dumps([tool.description, tool.parameters], ensure_ascii=False)
        if not self._has_control(written):
            return tool
        description, parameters = json.loads(self._seamed(written))
        return Tool(tool.name, description, parameters)

    def _has_control(self, text: str) -> bool:
        return self._controls is not None and self._controls.search(text) is not None

    def _seamed(self, text: str) -> str:
        assert self._controls is not None
        return self._controls.sub(_with_seam, text)


def _with_seam(match: re.Match[str]) -> str:
    return match[0][0] + SEAM + match[0][1:]
