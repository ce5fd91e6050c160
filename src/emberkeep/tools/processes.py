"""All processes of one command, to be ended together.

A process leaves its group and its session with one call, its parent by outliving it, and may start another one
without environment. What it does not lose by accident are its limits: each command gets a limit for the size of
files that no disk reaches and nobody else has, and on Linux every process that has it is found in /proc. A word in
the environment says the same where such a limit cannot be set. Elsewhere only the process group can be found.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_PROC = Path("/proc")
_WORD = "EMBER_COMMAND"
_MOST_BLOCKS = 1 << 41  # 1 PiB: nothing is ever written that is refused because of it
_BLOCK = 1024  # or 512: shells do not agree
_ENDING_S = 5.0
_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class Mark:
    """What every process of one command has, and no other."""

    word: str = field(default_factory=lambda: secrets.token_hex(8))
    blocks: int = field(default_factory=lambda: _blocks())

    @property
    def environment(self) -> dict[str, str]:
        return {_WORD: self.word}

    def applied(self, argv: list[str]) -> list[str]:
        """What to start, so that `argv` runs with the limit. The shell reads none of it, and is gone by then."""
        return ["/bin/sh", "-c", 'ulimit -S -f "$0" 2>/dev/null; exec "$@"', str(self.blocks), *argv]

    def is_on(self, pid: int) -> bool:
        """Whether it is a living process of this command."""
        folder = _PROC / str(pid)
        try:
            if _is_dead((folder / "stat").read_bytes()):
                return False
            is_limit = self._is_limit((folder / "limits").read_bytes())
            return is_limit or self._is_word((folder / "environ").read_bytes())
        except OSError:  # gone, or not ours
            return False

    def _is_limit(self, limits: bytes) -> bool:
        line = next((line for line in limits.splitlines() if line.startswith(b"Max file size")), b"")
        return any(b"%d" % (self.blocks * size) in line.split() for size in (_BLOCK, _BLOCK // 2))

    def _is_word(self, environ: bytes) -> bool:
        return f"{_WORD}={self.word}".encode() in environ.split(b"\0")


class Family:
    """A process that leads a group, and all that came of it. Methods block."""

    def __init__(self, leader: int, mark: Mark) -> None:
        self._leader = leader
        self._mark = mark

    def send(self, number: signal.Signals) -> bool:
        """To every one of them that lives. Whether any was found by its mark."""
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of the dead
            os.killpg(self._leader, number)
        seen: set[int] = set()
        found = False
        # While we looked, one may have started the next and ended.
        while new := _pids() - seen:
            seen |= new
            for pid in sorted(new):
                found |= self._mark.is_on(pid) and _send(pid, number)
        return found

    def kill(self) -> bool:
        """Until none is left. False where some do not end: the system is busy with them, or they are not ours."""
        deadline = time.monotonic() + _ENDING_S
        while self.send(signal.SIGKILL):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return True


def _blocks() -> int:
    """Below the limit in force, or all that have that one would be taken for ours."""
    import resource  # not on Windows

    now, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = _MOST_BLOCKS if now == resource.RLIM_INFINITY else min(now // _BLOCK, _MOST_BLOCKS)
    return most - 1 - secrets.randbelow(max(1, most // 8))


def _pids() -> set[int]:
    if sys.platform != "linux":
        return set()
    return {int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()}


def _send(pid: int, number: signal.Signals) -> bool:
    """Whether it was still there. Numbers go round: one that was just seen is not another's a moment later."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs as somebody else
        return True
    return True


def _is_dead(stat: bytes) -> bool:
    """It only waits for its parent to notice."""
    return stat[stat.rindex(b")") + 2 :][:1] in (b"Z", b"X")
