"""What a pull looks like: bars on a terminal, one line per step elsewhere. All of it on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from emberkeep.cli.common import console

if TYPE_CHECKING:
    from rich.console import Console

    from emberkeep.models.reporter import Reporter


@contextmanager
def pull_reporter() -> Iterator[Reporter]:
    from emberkeep.cli.bars import Bars

    output = console(stderr=True)
    reporter = Bars(output) if output.is_terminal else Lines(output)
    try:
        yield reporter
    finally:
        reporter.close()


class Lines:
    """A step is mentioned when it begins."""

    def __init__(self, output: Console) -> None:
        self._output = output
        self._step = ""

    def say(self, sentence: str) -> None:
        self._output.print(sentence, markup=False, soft_wrap=True)

    def progress(self, step: str, done: int, total: int | None) -> None:
        if step != self._step:
            self._step = step
            self.say(step)

    def close(self) -> None:
        pass
