"""What llama.cpp's pre-tokenizers need: stack for every character of a match, and some of them a limit for runs.

Most are a `std::regex`, which matches by recursion: libstdc++ takes some 320 bytes of stack for every character of
a match, and 25,000 letters in a row are more than a thread has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from emberkeep.engine.text_cutter import MAX_MATCH
from emberkeep.errors import EngineError

T = TypeVar("T")

CALLER_CHARS = 512
"""What may be tokenized on any thread: some systems give them as little as 512 KiB of stack."""

SLOW_WITH_RUNS = frozenset({"deepseek-llm", "superbpe"})
r"""Pre-tokenizers that try to find the end of a run from all of it: `\s+$`, and `(?=(\d{3})+(?!\d))`."""

FOR_EMBEDDINGS = frozenset({"whitespace"})
"""Pre-tokenizers that leave blanks in what is merged, at two of which llama.cpp ends the process. Only embedding
models have them."""

_STACK_BYTES = MAX_MATCH * 2048
"""Six times of what a match was seen to take. Only as much as one really takes becomes memory."""

_starting = threading.Lock()


def on_large_stack(call: Callable[[], T]) -> T:
    """What `call` returns or raises, from a thread whose stack a match of `MAX_MATCH` characters fits into.

    Blocks. Raises EngineError where no such thread can be started.
    """
    with ThreadPoolExecutor(1, "emberkeep-tokenizer") as thread:
        with _starting:  # the size is the process's: a thread that starts meanwhile elsewhere gets it too
            usual = threading.stack_size(_STACK_BYTES)
            try:
                result = thread.submit(call)
            except RuntimeError as error:
                raise EngineError(f"No thread could be started for tokenizing a text: {error}.") from error
            finally:
                threading.stack_size(usual)
        return result.result()
