"""`emberkeep serve`, as a person would start it."""

from __future__ import annotations

from pathlib import Path

from emberkeep.types.request import Json
from helpers.server_process import ServerProcess

RULES = "You are the careful secretary of a small harbour. " + " ".join(
    f"Rule {i}: ships of type {i} wait at pier {i * 7 % 13} and pay {i * 3 + 2} coins." for i in range(1, 25)
)
"""About 600 tokens that every agent would send with every call."""
STEADY = ("--flash-attention", "on")
"""Options of a server whose answers are compared: else it changes between two of them to the attention that is
quicker here, which rounds otherwise. The last token of a prompt also rounds otherwise beside all others than
alone, as after a reuse: the first answer to a question is compared with no other one."""


def serve(model: Path | str, data_dir: Path, *options: str) -> ServerProcess:
    """On a free port, unless the options name one."""
    return ServerProcess(
        *("-m", "emberkeep", "serve", "--port", "0", "--model", str(model)),
        *("--data-dir", str(data_dir), *options),
    )


def system(text: str = RULES) -> Json:
    return {"role": "system", "content": text}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str) -> Json:
    return {"role": "assistant", "content": text}
