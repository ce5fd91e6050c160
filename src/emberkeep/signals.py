"""Which signals end us, and how those that we start get theirs: as a terminal gives them, however we were started.

Under nohup, in the background of a script and under some supervisors SIGINT and SIGHUP are ignored or blocked, and
a child inherits that: these signals could not stop it. exec undoes handlers only, a shell cannot undo the rest,
`subprocess` does it for two signals, `preexec_fn` may deadlock beside threads, and Python can change dispositions
in the main thread alone. So a child begins as this file, which resets all of them and becomes the program.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

_RESTORED = frozenset((signal.SIGPIPE, signal.SIGXFSZ)) if os.name == "posix" else frozenset()
"""Python ignores them for itself, and `subprocess` gives them back."""
_CANNOT_RUN = 127
"""As shells say it."""


class Leaving(SystemExit):
    """A signal has asked this process to end. It is raised wherever the main thread is, and has to get through
    where a foreign function's own SystemExit is caught."""


def ending_signals() -> tuple[signal.Signals, ...]:
    """Those that ask this process to end. nohup switches SIGHUP off, and off it stays."""
    always = (signal.SIGINT, signal.SIGTERM)
    hears_hangups = os.name == "posix" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (*always, signal.SIGHUP) if hears_hangups else always


def with_default_signals(command: Sequence[str]) -> list[str]:
    """What to start so that `command` runs with every signal at its default and none of them blocked.

    Every child of ours is started through it, from any thread. It is `command` itself where this thread passes on
    nothing else. Where it does, a program that cannot be run ends with status 127 and a line on stderr, and there
    is no OSError.
    """
    if os.name != "posix" or not _passes_on_others():
        return list(command)
    return [sys.executable, "-I", "-S", __file__, *command]


def _passes_on_others() -> bool:
    ignored = (number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN)
    return any(number not in _RESTORED for number in ignored) or bool(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def _become(command: list[str]) -> NoReturn:
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(_CANNOT_RUN)


if __name__ == "__main__":
    _become(sys.argv[1:])
