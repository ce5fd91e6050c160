"""`EMBERKEEP_TEST_SLOW=20` adds up to 20 ms to every step of an engine and to every fsync, by chance.

Tests that hope for an order fail then. `python -m helpers.slowing ...` runs another program that slow.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

MOST_S = float(os.environ.get("EMBERKEEP_TEST_SLOW") or 0) / 1000


def slow_down() -> None:
    """This process, from now on."""
    from emberkeep.engine.fake import FakeEngine
    from emberkeep.engine.llamacpp.engine import LlamaEngine

    os.fsync = _late(os.fsync)
    for engine in (FakeEngine, LlamaEngine):
        engine.evaluate = _late(engine.evaluate)  # type: ignore[method-assign]


def _late(do: Callable[..., Any]) -> Callable[..., Any]:
    def after_a_while(*arguments: Any) -> Any:
        time.sleep(random.uniform(0, MOST_S))
        return do(*arguments)

    return after_a_while


if __name__ == "__main__":
    slow_down()
    is_module = sys.argv[1] == "-m"
    del sys.argv[: 2 if is_module else 1]
    run = runpy.run_module if is_module else runpy.run_path
    run(sys.argv[0], run_name="__main__")
