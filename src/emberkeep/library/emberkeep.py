"""`Emberkeep`: a loaded model with its stored state, for ordinary (not async) Python."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from emberkeep.backend.base import (
    Backend,
    Cache,
    ModelCard,
    attention_of,
    cache_of,
    experts_of,
    keep_warm,
    speculation_of,
    warm_prefix,
)
from emberkeep.config.settings import Config
from emberkeep.config.sources import load_config
from emberkeep.errors import EmberkeepError, InvalidField, Overloaded, RateLimited
from emberkeep.library.arguments import (
    Approximate,
    ChatOptions,
    Messages,
    PrefixOptions,
    PromptOptions,
    Tools,
    batch_requests,
    chat_request,
    prefix_request,
    prompt_or_chat_request,
    prompt_request,
    verify_options,
)
from emberkeep.library.bridge import Bridge
from emberkeep.library.installation import declared_prefixes, ensure_model
from emberkeep.library.results import (
    CANDIDATES,
    Collector,
    Result,
    Stream,
    VerifiedPrompt,
    VerifyReport,
    VerifySummary,
    WarmResult,
    keep_best,
)
from emberkeep.library.tool_session import ToolSession, is_runnable, own_toolbox
from emberkeep.library.user_memory import UserMemory, require_memory
from emberkeep.text import shorten
from emberkeep.types.cache import Verified
from emberkeep.types.events import Events
from emberkeep.types.lineage import SHARED
from emberkeep.types.models import AttentionTier, ExpertStats, SpeculationStats
from emberkeep.types.request import Json, Request

log = logging.getLogger("emberkeep")

_SHOWN_CHARS = 60

if TYPE_CHECKING:
    from emberkeep.tools.toolbox import ToolBox


class Emberkeep:
    """Every method blocks and may be called from any thread; concurrent calls share one batch.

    Use it in a `with` block or call `close`: the model stays in memory until then, and what is not yet on
    disk is written then (a program that ends without it evaluates that again, no more).
    """

    def __init__(self, backend: Backend, *, at_once: int = 8) -> None:
        """`at_once`: requests of a batch that are under way at a time."""
        self._backend = backend
        self._at_once = at_once
        self._bridge = Bridge()
        self._closed = False

    @classmethod
    def load(cls, model: str | None = None, **settings: object) -> Emberkeep:
        """Load `model` (a name, a .gguf file, a folder of safetensors, or None for the configured one).

        `settings` are the keys of `Config`; what is not given comes from the environment and the
        configuration file. The default model is pulled when it is missing. Raises ConfigError, ModelError,
        EngineError.
        """
        loaded = load_config({"model": model, **settings}, as_arguments=True)
        if loaded.warning:
            log.warning("%s", loaded.warning)
        ensure_model(loaded.config)
        return cls.open(loaded.config)

    @classmethod
    def from_pretrained(cls, model: str | Path, **settings: object) -> Emberkeep:
        """Load a model with PyTorch: a repository of the Hugging Face hub (`owner/name`), a folder or a GGUF file.

        As `load`, with the Hugging Face engine; a repository that is not here is pulled.
        """
        return cls.load(str(model), **{"engine": "hf", **settings})

    @classmethod
    def open(cls, config: Config) -> Emberkeep:
        """Load a model that is here, with settings that are settled. Raises ModelError, EngineError."""
        from emberkeep.runtime.served_models import open_backend

        prefixes = declared_prefixes(config)
        backend = open_backend(config)
        keep_warm(backend, prefixes)
        # Twice as many as run: the next prompts are tokenized when a slot is free.
        llm = cls(backend, at_once=2 * config.parallel)
        try:
            llm._bridge.run(backend.start())
        except BaseException:  # interrupted
            llm.close()
            raise
        return llm

    @property
    def card(self) -> ModelCard:
        return self._backend.card

    def generate(self, prompt: str, **options: Unpack[PromptOptions]) -> Result:
        """Continue a raw text; no chat template is applied. Raises RequestError, EngineError."""
        return _asked_for(self._finish(prompt_request(prompt, options)), options)

    def generate_batch(self, prompts: Sequence[Messages], **options: Unpack[PromptOptions]) -> list[Result]:
        """Answer many prompts, in order: texts as `generate` does, messages as `chat` does.

        They share steps, and what several begin with is evaluated once. One that fails has its `error` in its
        result, and the others go on. Raises RequestError, before anything runs, for what cannot be asked.
        """
        requests = [request.decided(in_pieces=False) for request in batch_requests(prompts, options)]
        results = self._bridge.run(PromptBatch(self._backend.generate, requests).run(self._at_once))
        return [_asked_for(result, options) for result in results]

    def chat(self, messages: Messages, *, tools: Tools | None = None, **options: Unpack[ChatOptions]) -> Result:
        """Answer a conversation: a text, or messages in OpenAI's shape.

        `tools`: Python functions with types and a docstring run here, as often as the model calls them, and what
        was said in between is in the result's `messages`; calls of definitions in OpenAI's shape are in its
        `tool_calls`. Raises RequestError, EngineError, and ConfigError for a function that is no tool.
        """
        request, toolbox = _request_and_toolbox(messages, tools, options)
        whole = request.decided(in_pieces=False)
        return _read(self._start(whole) if toolbox is None else self._act(whole, toolbox))

    def stream(self, messages: Messages, *, tools: Tools | None = None, **options: Unpack[ChatOptions]) -> Stream:
        """Answer a conversation piece by piece. `tools`: as in `chat`."""
        request, toolbox = _request_and_toolbox(messages, tools, options)
        return self._start(request) if toolbox is None else self._act(request, toolbox)

    def acting(self, config: Config, *, asks: bool) -> ToolSession:
        """With the tools that `config` names; `asks`: a person decides on dangerous ones. The caller closes it.

        Raises ConfigError.
        """
        from emberkeep.runtime.tools import open_toolbox

        tools = open_toolbox(config, memory=self._backend.memory, asks=asks)
        return ToolSession(self._bridge, self._backend, tools, asks=asks)

    def health(self) -> dict[str, Json]:
        """Which backend answers, and why the others do not."""
        return self._backend.health()

    def warm(
        self, prompt_or_messages: Messages = (), *, tools: Tools | None = None, **options: Unpack[PrefixOptions]
    ) -> WarmResult:
        """Evaluate a prefix now so that later requests find it stored. A text is a raw prompt.

        Of messages, what every conversation that begins with them has in common. Best effort: what goes wrong is
        in the result's `error` and in the log. Raises RequestError for a prefix that cannot be.
        """
        warmed = self._bridge.run(warm_prefix(self._backend, prefix_request(prompt_or_messages, tools, options)))
        return WarmResult(warmed.tokens, warmed.cached_tokens, 1e3 * warmed.seconds, warmed.error)

    def keep_warm(self, messages: Messages, *, tools: Tools | None = None) -> None:
        """Warm a prefix in the background, now and whenever it is about to fall out. Returns at once.

        What goes wrong is a line in the log. Raises RequestError for a prefix that cannot be.
        """
        # It counts against no user's limit: no request is refused because it is being evaluated.
        keep_warm(self._backend, [replace(prefix_request(messages, tools, {}), user=SHARED)])

    @property
    def cache(self) -> Cache:
        """What is stored: list, show, pin, remove, explain."""
        return cache_of(self._backend)

    @property
    def memory(self) -> UserMemory:
        """What is remembered: search it, tell it facts, forget it. Raises MemoryOff where it is switched off."""
        return UserMemory(require_memory(self._backend.memory))

    def verify_entry(self, entry_id: str, tokens: int = 16) -> Verified:
        """Continue an entry of the cache from its stored state and from a fresh evaluation, and compare.

        Raises NoSuchEntry, EngineError.
        """
        return self._bridge.run(cache_of(self._backend).verify(entry_id, tokens))

    def verify(
        self,
        prompt_or_messages: Messages,
        max_tokens: int = 32,
        *,
        approximate: Approximate = None,
        kv_bits: int | None = None,
    ) -> VerifyReport:
        """Compare a greedy answer from stored state with a freshly evaluated one. A text is a raw prompt.

        The prompt is stored first, in `kv_bits`. With `approximate` it is not: what is stored already is moved
        into it. Raises RequestError, EngineError.
        """
        options = verify_options(max_tokens, approximate, kv_bits)
        return self._verify(prompt_or_chat_request(prompt_or_messages, options))

    def verify_batch(
        self,
        prompts: Sequence[Messages],
        max_tokens: int = 32,
        *,
        approximate: Approximate = None,
        kv_bits: int | None = None,
    ) -> VerifySummary:
        """Compare each of many prompts as `verify` does, and tell how far they agree, one by one and overall.

        They run one after the other: in steps that several share, answers round differently. One that fails has
        its `error` in its item, and the others go on. Raises RequestError, before anything runs, for what cannot
        be asked.
        """
        requests = batch_requests(prompts, verify_options(max_tokens, approximate, kv_bits))
        return VerifySummary(tuple(map(self._verified, requests)))

    def _verified(self, asked: Request) -> VerifiedPrompt:
        text = asked.prompt if isinstance(asked.prompt, str) else asked.messages[-1].content
        shown = shorten(" ".join(text.split()), _SHOWN_CHARS)
        try:
            return VerifiedPrompt(shown, self._verify(asked))
        except EmberkeepError as error:
            return VerifiedPrompt(shown, error=error)

    def _verify(self, asked: Request) -> VerifyReport:
        if not asked.approximate:
            self._finish(replace(asked, max_tokens=0))
        greedy = replace(asked, top_logprobs=CANDIDATES).decided(from_store=True, is_kept=False)
        fresh = self._finish(replace(greedy, approximate=False, use_cache=False))
        return VerifyReport(self._finish(greedy), fresh, self._follow(greedy, fresh))

    def _follow(self, request: Request, fresh: Result) -> Result | None:
        """The result of `request` with the fresh answer forced; None if not all of its tokens are known."""
        if not fresh.tokens or len(fresh.tokens) != fresh.usage.completion_tokens:
            return None
        return self._finish(replace(request, forced=fresh.tokens, max_tokens=len(fresh.tokens)))

    def stats(self) -> dict[str, Json]:
        return self._bridge.call(self._backend.stats)

    def speculative_stats(self) -> SpeculationStats:
        """How much was drafted, by which source, and how much of it was accepted; or why nothing is."""
        return speculation_of(self._backend)

    def expert_stats(self) -> ExpertStats:
        """Which experts were chosen while they were counted. Raises RequestError for a model without experts."""
        return experts_of(self._backend).stats()

    def track_experts(self, enabled: bool | None = None, *, reset: bool = False) -> ExpertStats:
        """Begin or end to count which experts are chosen, or count anew. Running calls finish before it.

        Raises RequestError for a model without experts.
        """
        return self._bridge.run(experts_of(self._backend).track(enabled, reset=reset))

    def attention_tier(self, switch_to: str | None = None) -> str | None:
        """Which code computes attention: `own`, `flash` or `plain`; None for an engine without a choice.

        With `switch_to` another one is used from now on; running calls finish before it. It computes other bytes:
        until the model's first one is used again, nothing is stored, and nothing stored is reused. Raises
        RequestError for one that is not there.
        """
        if switch_to is not None:
            if switch_to not in list(AttentionTier):
                raise InvalidField("switch_to", f"it must be one of {', '.join(AttentionTier)}.")
            self._bridge.run(attention_of(self._backend).switch(AttentionTier(switch_to)))
        attention = self._backend.attention
        return attention.tier if attention else None

    def close(self) -> None:
        """Finish or fail what runs and write what is not yet on disk. Calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        try:
            self._bridge.run(self._backend.close())
        finally:
            self._bridge.close()

    def __enter__(self) -> Emberkeep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _act(self, request: Request, toolbox: ToolBox) -> Stream:
        """A toolbox of functions alone has nothing to close."""
        return ToolSession(self._bridge, self._backend, toolbox, asks=False).stream(request)

    def _start(self, request: Request) -> Stream:
        return Stream(self._bridge.iterate(lambda: self._backend.generate(request)))

    def _finish(self, request: Request) -> Result:
        return _read(self._start(request.decided(in_pieces=False)))


def _asked_for(result: Result, options: PromptOptions) -> Result:
    """The result with as many of its choices as were asked for, the likeliest of those that were tried."""
    kept = options.get("n") or 1
    if result.error is not None or (options.get("best_of") or kept) == kept:
        return result
    return keep_best(result, kept, with_logprobs=bool(options.get("logprobs")))


def _read(stream: Stream) -> Result:
    with stream:
        for _ in stream.events():
            pass
        return stream.result


def _request_and_toolbox(
    messages: Messages, tools: Tools | None, options: ChatOptions
) -> tuple[Request, ToolBox | None]:
    """With a toolbox where there are functions to run."""
    listed: list[Any] = list(tools or ())
    toolbox = own_toolbox([one for one in listed if is_runnable(one)])
    definitions = [one for one in listed if not is_runnable(one)]
    names = [function.name for function in toolbox.functions()]
    return chat_request(messages, definitions, options, functions=names), toolbox if names else None


# ── many requests at once ──


class PromptBatch:
    """Belongs to the event loop. The scheduler puts what is under way into its steps together, and lets those wait
    whose beginning another one is about to evaluate."""

    def __init__(self, generate: Callable[[Request], Events], requests: Sequence[Request]) -> None:
        self._generate = generate
        self._waiting = deque(enumerate(requests))
        self._results: dict[int, Result] = {}
        self._under_way = 0

    async def run(self, at_once: int) -> list[Result]:
        """With so many of them under way, or as many as are let in beside other callers'."""
        tasks = [asyncio.create_task(self._work()) for _ in range(min(at_once, len(self._waiting)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [self._results[place] for place in sorted(self._results)]

    async def _work(self) -> None:
        while self._waiting:
            place, request = self._waiting.popleft()
            self._under_way += 1
            collector = Collector()
            try:
                await self._answer(request, collector)
                self._results[place] = collector.result()
            except (Overloaded, RateLimited) as error:
                if self._under_way > 1:  # another of ours ends, and goes on with it
                    self._waiting.appendleft((place, request))
                    return
                self._results[place] = replace(collector.result(), error=error)
            except EmberkeepError as error:
                self._results[place] = replace(collector.result(), error=error)
            finally:
                self._under_way -= 1

    async def _answer(self, request: Request, collector: Collector) -> None:
        async with aclosing(self._generate(request)) as events:
            async for event in events:
                collector.add(event)
