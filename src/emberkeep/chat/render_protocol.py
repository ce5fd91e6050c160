"""What is said between this process and those that render templates, and what a rendering may take."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Any

from emberkeep.errors import TemplateFailed

QUESTION_HEADER = Struct("<dQ")
"""Seconds that the answer may take, and the size of what follows: plain values in marshal's format."""
ANSWER_HEADER = Struct("<BQ")
"""An `AnswerKind`, and the size of the text that follows, as UTF-8."""

MAX_SECONDS = 2.0
MORE_SECONDS_PER_MESSAGE = 0.01
"""Some templates look at all messages again for each message."""
MAX_OUTPUT = 32 << 20


class AnswerKind(IntEnum):
    TEXT = 1
    FAILED = 2
    """A sentence."""
    SPENT = 3
    """A sentence; and the worker ends, because it ran out of memory somewhere."""
    UNKNOWN = 4
    """The template has to be loaded first."""


Question = tuple[Any, ...]
"""("load", key, source) | ("traits", key, specials) | ("render", key, values)"""


def stop_error(reason: str) -> TemplateFailed:
    return TemplateFailed(f"The model's chat template was stopped: {reason}.", "messages")
