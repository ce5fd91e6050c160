"""Users meet no other errors than these.

    EmberkeepError
    ├── ConfigError            a setting is unknown or has a bad value
    ├── ModelError             a model is not usable here
    │   ├── ModelNotFound      no such model here
    │   ├── ModelBroken        its files cannot be used
    │   └── DownloadFailed     a download failed
    ├── RequestError           the caller asked for something that cannot be done
    │   ├── InvalidField       one named field has a bad value
    │   ├── ContextExceeded    the prompt is longer than the context
    │   │   └── InputTooLong   a text to embed is
    │   ├── TooLarge           there is not enough memory for the prompt
    │   ├── NoSuchEntry        nothing of that name is here
    │   └── TemplateFailed     the chat template refused these messages
    ├── StoreFailed            what is stored could not be removed
    ├── MemoryFailed           what should be remembered cannot be written or read
    │   └── MemoryOff          nothing is remembered here
    ├── ToolFailed             a tool could not do what it was called for
    ├── RemoteError            a model that runs somewhere else did not answer
    │   ├── RemoteDown         it is unreachable or busy: try later, or another one
    │   ├── RemoteRefused      its key is missing or wrong
    │   ├── RemoteLoop         servers pass a request round in a circle
    │   └── RemoteFull         the conversation is longer than its context
    ├── Overloaded             the queue is full, or the server is shutting down
    ├── RateLimited            one user has as many requests here as a user may have
    ├── DeadlineExceeded       the request ran out of its time
    └── EngineError            the engine cannot do its work
        └── StepFailed         memory or the model failed, and not because of stored state

A message is one sentence that says what is wrong and what to do about it. Foreign errors (ctypes, SQLite,
HTTP) are translated where they enter; `api/errors.py` maps this tree to HTTP statuses.
"""

from __future__ import annotations


class EmberkeepError(Exception):
    """Base of everything raised on purpose."""


class ConfigError(EmberkeepError):
    pass


class ModelError(EmberkeepError):
    pass


class ModelNotFound(ModelError):
    pass


class ModelBroken(ModelError):
    pass


class DownloadFailed(ModelError):
    pass


class RequestError(EmberkeepError):
    """`param` names the request field at fault, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidField(RequestError):
    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param)


class ContextExceeded(RequestError):
    def __init__(
        self, prompt_tokens: int, context: int, *, may_evict: bool = True, is_counted: bool = True
    ) -> None:
        """`may_evict`: old messages may leave, but none is left. Not `is_counted`: there may be more."""
        also = "" if may_evict else "let old messages leave (evict), "
        count = str(prompt_tokens) if is_counted else f"at least {prompt_tokens}"
        super().__init__(
            f"This model's maximum context length is {context} tokens and the prompt has {count}: "
            f"send less, {also}or load the model with a larger ctx.",
            "messages",
        )
        self.prompt_tokens = prompt_tokens
        self.context = context
        self.is_counted = is_counted


class InputTooLong(ContextExceeded):
    """`number` counts the inputs from 0 on."""

    def __init__(self, number: int, tokens: int, context: int, param: str = "input") -> None:
        super().__init__(tokens, context)
        RequestError.__init__(
            self,
            f"{param}[{number}] has {tokens} tokens, and the maximum context length is {context} tokens: send "
            "less, or set truncate to true, which leaves out the end of what is too long.",
            param,
        )


class TooLarge(RequestError):
    """`needed` and `available` are bytes; no more than `suggested_max_tokens` would fit, 0 if nothing would."""

    def __init__(
        self, message: str, *, prompt_tokens: int, needed: int, available: int, suggested_max_tokens: int
    ) -> None:
        super().__init__(message, "messages")
        self.prompt_tokens = prompt_tokens
        self.needed = needed
        self.available = available
        self.suggested_max_tokens = suggested_max_tokens


class NoSuchEntry(RequestError):
    pass


class TemplateFailed(RequestError):
    pass


class StoreFailed(EmberkeepError):
    pass


class MemoryFailed(EmberkeepError):
    pass


class MemoryOff(MemoryFailed):
    def __init__(self) -> None:
        super().__init__(
            "Nothing is remembered here: set memory = true, or look in the log why its file could not be opened."
        )


class ToolFailed(EmberkeepError):
    """The model reads it, and tries something else."""


class RemoteError(EmberkeepError):
    pass


class RemoteDown(RemoteError):
    """`retry_after`: seconds; None: the service gave none."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RemoteRefused(RemoteError):
    pass


class RemoteLoop(RemoteError):
    pass


class RemoteFull(RemoteError):
    pass


class Overloaded(EmberkeepError):
    """`retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimited(EmberkeepError):
    """`retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(EmberkeepError):
    pass


class EngineError(EmberkeepError):
    pass


class StepFailed(EngineError):
    pass
