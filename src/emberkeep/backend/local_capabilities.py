"""What only a local model can do besides answering: tokenize, count experts, switch attention."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from emberkeep.backend.base import NO_ARGS, ModelTexts
from emberkeep.chat.prompt import PromptBuilder
from emberkeep.chat.prompt_tokens import SeamedText
from emberkeep.chat.template import ChatTemplate
from emberkeep.engine.base import AttentionTiers, ExpertTracking
from emberkeep.errors import RequestError
from emberkeep.sched.scheduler import Scheduler
from emberkeep.types.models import AttentionTier, ExpertStats, Vocab
from emberkeep.types.request import Json, Message, Request, Tool


class LocalTokenizer:
    def __init__(
        self,
        vocab: Vocab,
        template: ChatTemplate,
        prompts: PromptBuilder,
        equip: Callable[[Request], Request],
    ) -> None:
        """`equip`: a request as its prompt is made of it. Raises RequestError for what the model cannot read."""
        self._vocab = vocab
        self._template = template
        self._prompts = prompts
        self._equip = equip

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids = self._vocab.tokenize(text, parse_special=parse_special)
        return [*self._prompts.lead(SeamedText(text)), *ids] if add_special else ids

    def detokenize(self, tokens: Sequence[int]) -> str:
        self._prompts.check_ids(tokens, "tokens")
        return self._prompts.detokenize(tokens)

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        self._prompts.check_ids(tokens, "tokens")
        return [self._vocab.pieces[token] for token in tokens]

    def texts(self) -> ModelTexts:
        def text(token: int | None) -> str:
            return "" if token is None else self._vocab.pieces[token].decode("utf-8", "replace")

        return ModelTexts(self._template.source, text(self._vocab.bos), text(self._vocab.eos))

    def apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        args: Mapping[str, Json] = NO_ARGS,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        return self._template.render(messages, tools, args=args, add_generation_prompt=add_generation_prompt)

    def count(self, request: Request) -> int:
        equipped = self._equip(request)
        return self._prompts.count(equipped, equipped.messages)


class LocalExperts:
    """`track` belongs to one event loop."""

    def __init__(self, tracking: ExpertTracking, scheduler: Scheduler) -> None:
        self._tracking = tracking
        self._scheduler = scheduler
        self._turn = asyncio.Lock()

    def stats(self) -> ExpertStats:
        return self._tracking.stats()

    async def track(self, enabled: bool | None, *, reset: bool) -> ExpertStats:
        def change() -> ExpertStats:
            if enabled is not None:
                self._tracking.track(enabled)
            if reset:
                self._tracking.reset()
            return self._tracking.stats()

        async with self._turn:  # one after the other, so that the last word counts
            switches = enabled not in (None, self._tracking.stats().enabled)
            run = self._scheduler.when_idle if switches else self._scheduler.call
            return await asyncio.wrap_future(run(change))


class LocalAttention:
    def __init__(self, attention: AttentionTiers, scheduler: Scheduler) -> None:
        self._attention = attention
        self._scheduler = scheduler

    @property
    def tier(self) -> AttentionTier:
        return self._attention.tier

    async def switch(self, tier: AttentionTier) -> None:
        available = self._attention.available
        if tier not in available:
            raise RequestError(f"Attention can be {', '.join(available)} on this device, not {tier}.")
        if tier is not self._attention.tier:
            await asyncio.wrap_future(self._scheduler.when_idle(lambda: self._attention.switch(tier)))
