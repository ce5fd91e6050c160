"""The request story over our own scheduler and engine: messages to text to tokens to jobs to events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np

from emberkeep.backend.base import ModelCard
from emberkeep.backend.channel import Channel, Outbox
from emberkeep.backend.places import Place, Places
from emberkeep.chat.dialects import Reasoning, open_reasoning
from emberkeep.chat.grammar import Constraint, Grammars
from emberkeep.chat.stream import TextStream
from emberkeep.chat.template import ChatTemplate
from emberkeep.chat.tokens import PromptTokenizer
from emberkeep.errors import ContextExceeded, EmberkeepError, InvalidField, TemplateFailed
from emberkeep.kv.keys import ChunkKey, TokenArray
from emberkeep.kv.store import KvStore
from emberkeep.sched.job import Ending, EndReason, Job
from emberkeep.sched.lookahead import Lookahead
from emberkeep.sched.loop import EngineLoop
from emberkeep.sched.sampling import Sampler
from emberkeep.types import (
    Completed,
    Event,
    Finished,
    FinishReason,
    Json,
    Message,
    Progress,
    Request,
    Sampling,
    TextDelta,
    Timings,
    TokenLogprob,
    Tool,
    Usage,
    Vocab,
)

_REHEARSAL = " ".join(f"{word} {number}" for number, word in enumerate(["state", "token", "prompt", "cache"] * 64))


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str
    tokens: TokenArray
    closing: tuple[int, ...]
    constraint: Constraint | None
    read_ahead: set[ChunkKey]


@dataclass(frozen=True, slots=True)
class _Ended:
    """One choice is over."""

    index: int
    ending: Ending
    reasoning_tokens: int


_Item = Event | _Ended | EmberkeepError


class _Choice:
    """A job's consumer: tokens in, events out. Lives on the engine's thread."""

    def __init__(
        self, index: int, stream: TextStream, channel: Channel[_Item], place: Place, *, in_pieces: bool
    ) -> None:
        self._in_pieces = in_pieces
        self._index = index
        self._stream = stream
        self._channel = channel
        self._place = place
        self.is_over = False

    def progress(self, progress: Progress) -> None:
        if self._index == 0:
            self._channel.put(progress)

    def token(self, token: int, logprob: TokenLogprob | None) -> bool:
        events, stop = self._stream.push(token, logprob)
        for event in events:
            self._channel.put(event, wake=self._in_pieces)
        return stop

    def kept_tokens(self) -> int:
        return self._stream.text_kept_tokens

    def ended(self, ending: Ending) -> None:
        self._over()
        for event in self._stream.finish(cut=ending.reason is EndReason.LENGTH):
            self._channel.put(event)
        self._channel.put(Finished(self._index, self._finish_reason(ending)))
        self._channel.put(_Ended(self._index, ending, self._stream.reasoning_tokens))

    def failed(self, error: EmberkeepError) -> None:
        self._over()
        self._channel.put(error)

    def _over(self) -> None:
        self.is_over = True
        self._place.choice_over()

    def _finish_reason(self, ending: Ending) -> FinishReason:
        if self._stream.saw_tool_calls:
            return FinishReason.TOOL_CALLS
        return FinishReason.LENGTH if ending.reason is EndReason.LENGTH else FinishReason.STOP


class LocalBackend:
    """Owns the loop, which flushes `outbox`, and the store."""

    def __init__(
        self,
        card: ModelCard,
        vocab: Vocab,
        template: ChatTemplate,
        loop: EngineLoop,
        store: KvStore,
        outbox: Outbox,
        places: Places,
        *,
        context: int,
        deadline_s: float | None = None,
        drain_s: float = 0.0,
    ) -> None:
        self.card = card
        self._vocab = vocab
        self._template = template
        self.loop = loop
        self._store = store
        self._outbox = outbox
        self._places = places
        self._context = context
        self._deadline_s = deadline_s
        self._drain_s = drain_s
        self._tokenizer = PromptTokenizer(vocab)
        self._grammars = Grammars(vocab)
        self._turn_end = tuple(self._tokenizer.encode(template.turn_end)) if template.turn_end else ()
        self._rehearse()

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        arrived = monotonic()
        place = self._places.take(request.n)
        jobs: list[tuple[Job, _Choice]] = []
        try:
            prompt = await asyncio.to_thread(self._prepare, request)
            channel: Channel[_Item] = Channel(self._outbox)
            jobs = self._jobs(request, prompt, channel, place, arrived)
            for job, _ in jobs:
                self.loop.submit(job)
            if request.echo:
                for index in range(request.n):
                    yield TextDelta(index, prompt.text)
            async for event in _until_completed(channel, len(jobs)):
                yield event
        finally:
            for job, choice in jobs:
                if not choice.is_over:
                    self.loop.cancel(job)
            place.leave()

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids = self._vocab.tokenize(text, parse_special=parse_special)
        return [*self._lead(text), *ids] if add_special else ids

    def detokenize(self, tokens: Sequence[int]) -> str:
        self._check_ids(tokens, "tokens")
        return b"".join(self._vocab.pieces[token] for token in tokens).decode("utf-8", "replace")

    def apply_template(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        return self._template.render(messages, tools)

    def stats(self) -> dict[str, Json]:
        costs = self._store.costs
        return {
            "model": self.card.id,
            "scheduler": self.loop.stats(),
            "store": self._store.stats(),
            "measured": {
                "evaluate_tokens_per_s": costs.evaluate.value,
                "import_bytes_per_s": costs.import_.value,
                "read_bytes_per_s": costs.read.value,
            },
        }

    async def close(self) -> None:
        await asyncio.to_thread(self.loop.close, self._drain_s)
        await asyncio.to_thread(self._store.close)

    def _rehearse(self) -> None:
        """Go through the motions once, so that the first request does not pay for lazy imports and cold caches."""
        with suppress(TemplateFailed):
            self._render(Request(messages=(Message("user", "Hello."),)))
        self._tokenizer.encode(_REHEARSAL)
        request = Request(prompt=(0,), sampling=Sampling(seed=0))
        TextStream.for_request(self._vocab, request, index=0, prompt="").push(0)
        Sampler(request.sampling).sample(np.zeros(self._vocab.size, np.float32), self._vocab.pieces)

    # ── preparing: on a worker thread ──

    def _prepare(self, request: Request) -> _Prompt:
        """Everything about a request that needs no engine. Raises RequestError."""
        self._store.refresh()
        look = Lookahead(self._store, self.loop.recent, self._vocab, request.namespace)
        if isinstance(request.prompt, tuple):
            self._check_ids(request.prompt, "prompt")
            text, ids, ahead = self.detokenize(request.prompt), list(request.prompt), set[ChunkKey]()
        else:
            text = request.prompt if request.prompt is not None else self._render(request)
            lead = self._lead(text)
            ahead = look.read_ahead(self.detokenize(lead) + text) if request.use_cache else set()
            ids = self._tokenizer.encode(text, replay=look.replay, before=lead)
        self._check_length(request, len(ids))
        return _Prompt(
            text=text,
            tokens=np.array(ids, np.int32),
            closing=self._turn_end if request.prompt is None else (),
            constraint=self._grammars.constraint_for(request),
            read_ahead=ahead,
        )

    def _render(self, request: Request) -> str:
        if not request.messages:
            raise InvalidField("messages", "at least one message is needed.")
        return self._template.render(request.messages, request.tools, args=request.template_args)

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if any(not 0 <= token < self._vocab.size for token in ids):
            raise InvalidField(param, f"token ids must be between 0 and {self._vocab.size - 1}.")

    def _check_length(self, request: Request, length: int) -> None:
        if length == 0:
            raise InvalidField("prompt", "the prompt is empty: send at least one token.")
        if length + (request.max_tokens != 0) > self._context:
            raise ContextExceeded(length, self._context)
        bad = [token for token in request.sampling.logit_bias if not 0 <= token < self._vocab.size]
        if bad:
            raise InvalidField("logit_bias", f"{bad[0]} is not a token of this model.")

    def _lead(self, text: str) -> tuple[int, ...]:
        """The token that the model wants before any text, unless the text writes it itself."""
        bos = self._vocab.bos
        if not self._vocab.adds_bos or bos is None:
            return ()
        return () if text.startswith(self.detokenize([bos])) else (bos,)

    # ── jobs ──

    def _jobs(
        self, request: Request, prompt: _Prompt, channel: Channel[_Item], place: Place, arrived: float
    ) -> list[tuple[Job, _Choice]]:
        reasoning = open_reasoning(prompt.text) if request.prompt is None else None
        jobs = []
        for index in range(request.n):
            choice = _Choice(
                index,
                TextStream.for_request(self._vocab, request, index=index, prompt=prompt.text),
                channel,
                place,
                in_pieces=request.in_pieces,
            )
            jobs.append((self._job(request, prompt, choice, index, reasoning, arrived), choice))
        return jobs

    def _job(
        self,
        request: Request,
        prompt: _Prompt,
        choice: _Choice,
        index: int,
        reasoning: Reasoning | None,
        arrived: float,
    ) -> Job:
        room = self._context - len(prompt.tokens)
        closing = prompt.closing if room > len(prompt.closing) else ()
        limit = room - len(closing)
        matcher = prompt.constraint.matcher(reasoning) if prompt.constraint else None
        deadline_s = request.deadline_s or self._deadline_s
        return Job(
            tokens=prompt.tokens,
            sampler=Sampler(_for_choice(request, index), matcher, request.top_logprobs),
            consumer=choice,
            max_new=limit if request.max_tokens is None else min(request.max_tokens, limit),
            closing=closing,
            given=isinstance(request.prompt, tuple),
            namespace=request.namespace,
            use_cache=request.use_cache,
            want_progress=request.want_progress,
            deadline=arrived + deadline_s if deadline_s is not None else None,
            read_ahead=frozenset(prompt.read_ahead),
            submitted=arrived,
        )


def _for_choice(request: Request, index: int) -> Sampling:
    """Choices of one request draw differently even when the request has a seed."""
    sampling = request.sampling
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index)


async def _until_completed(channel: Channel[_Item], choices: int) -> AsyncIterator[Event]:
    endings: list[_Ended] = []
    while len(endings) < choices:
        item = await channel.take()
        if isinstance(item, EmberkeepError):
            raise item
        if isinstance(item, _Ended):
            endings.append(item)
        else:
            yield item
    yield _completed(sorted(endings, key=lambda ended: ended.index))


def _completed(endings: list[_Ended]) -> Completed:
    first = endings[0].ending
    sampled = sum(ended.ending.sampled_tokens for ended in endings)
    reused = first.lookup.reused_tokens
    return Completed(
        usage=Usage(
            prompt_tokens=first.prompt_tokens,
            completion_tokens=sampled,
            cached_tokens=reused,
            reasoning_tokens=sum(ended.reasoning_tokens for ended in endings),
        ),
        timings=Timings(
            cache_n=reused,
            prompt_n=first.prompt_tokens - reused,
            prompt_ms=first.prompt_ms,
            predicted_n=sampled,
            predicted_ms=max(ended.ending.decode_ms for ended in endings),
            ttft_ms=first.ttft_ms,
            queue_ms=first.queue_ms,
        ),
        lookup=first.lookup,
    )
