"""Google's Gemini API as it is on the wire: chunks, parts, usage, errors."""

from __future__ import annotations

import json
import re
from typing import Any

from helpers.vendors.loopback import Asked, LoopbackServer, Reply, Stream

KEY = "AIzaCanary7f3a9c"
MODEL = "gemini-3.8-flash"


class GeminiServer(LoopbackServer):
    def __init__(self, *replies: Reply | Stream) -> None:
        """Without replies it says hello."""
        super().__init__()
        self._replies = list(replies)

    def reply(self, asked: Asked) -> Reply | Stream:
        if asked.headers.get("x-goog-api-key") != KEY:
            reason = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}]
            message = f"API key not valid: {asked.headers.get('x-goog-api-key')}"
            return failed(400, "INVALID_ARGUMENT", message, reason)
        if asked.path.startswith("/v1/models?"):
            model = {"name": f"models/{MODEL}", "inputTokenLimit": 1_048_576, "outputTokenLimit": 65_536}
            return Reply({"models": [model]})
        if asked.path != f"/v1/models/{MODEL}:streamGenerateContent?alt=sse":
            return failed(404, "NOT_FOUND", "models/none is not found for API version v1")
        return self._replies.pop(0) if self._replies else said("Hello!")


def failed(status: int, name: str, message: str, details: list[Any] | None = None) -> Reply:
    error = {"code": status, "message": message, "status": name, "details": details or []}
    return Reply({"error": error}, status)


def said(*texts: str, **usage: int) -> Stream:
    return Stream([*(chunk({"text": text}) for text in texts), last(**usage)])


def chunk(*parts: dict[str, Any]) -> str:
    content = {"parts": list(parts), "role": "model"}
    return _event({"candidates": [{"content": content, "index": 0}], "modelVersion": MODEL})


def last(reason: str = "STOP", **usage: int) -> str:
    counts = {"promptTokenCount": 10, "candidatesTokenCount": 7, "totalTokenCount": 17, **usage}
    candidate = {"content": {"parts": [{"text": ""}], "role": "model"}, "finishReason": reason, "index": 0}
    return _event({"candidates": [candidate], "usageMetadata": counts, "modelVersion": MODEL})


def blocked(reason: str) -> Stream:
    return Stream([_event({"promptFeedback": {"blockReason": reason}, "modelVersion": MODEL})])


def camel(value: Any) -> Any:
    """With the spelling of the API's documents: the SDK writes some keys with underscores, and both are taken."""
    if isinstance(value, list):
        return [camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    keys = {key: re.sub(r"_(\w)", lambda match: match[1].upper(), key) for key in value}
    return {keys[key]: item if keys[key].endswith("JsonSchema") else camel(item) for key, item in value.items()}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\r\n\r\n"
