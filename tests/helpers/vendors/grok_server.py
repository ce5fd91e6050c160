"""xAI's gRPC service, with the SDK's own generated servicers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any

import grpc
from xai_sdk.proto import chat_pb2, chat_pb2_grpc, models_pb2, models_pb2_grpc, sample_pb2, usage_pb2

KEY = "xai-canary-a81b4e"
MODEL = "grok-4.6"
HANG = "nothing more comes"

Failure = tuple[grpc.StatusCode, str, dict[str, str]]
Step = Any
"""A chunk, a failure, or HANG."""


class GrokServer(chat_pb2_grpc.ChatServicer, models_pb2_grpc.ModelsServicer):  # type: ignore[misc]
    def __init__(self, *scripts: Sequence[Step]) -> None:
        """Without scripts it says hello."""
        self.asked: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.was_left = asyncio.Event()
        """A client has gone before the end of its answer."""
        self._scripts = list(scripts)
        self._port = 0
        self._server: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def GetCompletionChunk(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked.append(request)
        await self._admit(context)
        try:
            for step in self._scripts.pop(0) if self._scripts else said("Hello!"):
                if isinstance(step, tuple):
                    await self._fail(context, step)
                elif step == HANG:
                    await asyncio.Event().wait()
                else:
                    yield step
        except asyncio.CancelledError:
            self.was_left.set()
            raise

    async def ListLanguageModels(self, request: Any, context: Any) -> Any:
        await self._admit(context)
        model = models_pb2.LanguageModel(name=MODEL, aliases=["grok"], max_prompt_length=131_072)
        return models_pb2.ListLanguageModelsResponse(models=[model])

    async def __aenter__(self) -> GrokServer:
        self._server = grpc.aio.server()
        chat_pb2_grpc.add_ChatServicer_to_server(self, self._server)
        models_pb2_grpc.add_ModelsServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(None)

    async def _admit(self, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        given = self.metadata[-1].get("authorization")
        if given != f"Bearer {KEY}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"Incorrect API key provided: {given}")

    async def _fail(self, context: Any, failure: Failure) -> None:
        code, details, trailing = failure
        await context.abort(code, details, tuple(trailing.items()))


def failed(code: grpc.StatusCode, details: str, **trailing: str) -> Failure:
    return code, details, {name.replace("_", "-"): value for name, value in trailing.items()}


def said(*pieces: str) -> list[Step]:
    return [*(chunk(content=piece) for piece in pieces), ended()]


def chunk(**delta: Any) -> Any:
    return _chunk(chat_pb2.CompletionOutputChunk(delta=chat_pb2.Delta(role=chat_pb2.ROLE_ASSISTANT, **delta)))


def ended(reason: str = "REASON_STOP", **usage: int) -> Any:
    delta = chat_pb2.Delta(role=chat_pb2.ROLE_ASSISTANT)
    output = chat_pb2.CompletionOutputChunk(delta=delta, finish_reason=sample_pb2.FinishReason.Value(reason))
    counts = {"prompt_tokens": 10, "completion_tokens": 5, **usage}
    return _chunk(output, usage=usage_pb2.SamplingUsage(**counts))


def call(id: str, name: str, arguments: str, kind: str = "CLIENT_SIDE_TOOL") -> Any:
    function = chat_pb2.FunctionCall(name=name, arguments=arguments)
    return chat_pb2.ToolCall(id=id, type=chat_pb2.ToolCallType.Value(f"TOOL_CALL_TYPE_{kind}"), function=function)


def _chunk(output: Any, **fields: Any) -> Any:
    return chat_pb2.GetChatCompletionChunk(id="r1", model=MODEL, outputs=[output], **fields)
