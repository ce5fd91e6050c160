"""Weights that stay in RAM: what is locked can be neither swapped out nor dropped.

llama.cpp can lock by itself, but what it locks are the pages of the file, and on a CPU it computes from copies
of most weights in another layout, which it leaves alone. So the memory that loading a model has added is locked
here.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from emberkeep.config.kinds import readable_size

log = logging.getLogger("emberkeep.engine")

Range = tuple[int, int]
"""Addresses, of which the second is behind the last byte."""

CAN_TELL_MEMORY = sys.platform == "linux"
"""Whether `private_memory` knows anything."""
_MAPS, _STATUS = Path("/proc/self/maps"), Path("/proc/self/status")
_CAP_IPC_LOCK = 14
_LEAST = 1 << 20
"""Bytes of what may hold weights: smaller pieces are somebody else's."""


def lock_weights(ranges: Iterable[Range]) -> int:
    """Lock all of them, or nothing; where the limit is too low, a warning says so. How many bytes are locked."""
    whole = [_pages(each) for each in ranges]
    size, done = sum(end - begin for begin, end in whole), []
    _raise_limit()
    try:
        for each in whole:
            done.append(each)  # it may be locked half
            _call("mlock", each)
    except OSError as error:
        for each in done:
            with suppress(OSError):
                _call("munlock", each)
        log.warning(
            "%s of weights cannot be locked in RAM (%s): raise the limit, as `emberkeep doctor` says; "
            "they are used without",
            readable_size(size),
            error.strerror,
        )
        return 0
    log.info("%s of weights are locked in RAM", readable_size(size))
    return size


def private_memory(maps: Path = _MAPS) -> list[Range]:
    """All large pieces of this process's memory that belong to no file; none where the system does not say."""
    found = []
    with suppress(OSError):
        for line in maps.read_text().splitlines():
            addresses, mode, _, _, inode, *name = line.split(None, 5)
            if mode.startswith("rw") and inode == "0" and not name:
                begin, end = (int(part, 16) for part in addresses.split("-"))
                found.append((begin, end))
    return found


def added(before: Sequence[Range], after: Sequence[Range]) -> list[Range]:
    """What is in `after` and was not in `before`, as far as it is large. Pure."""
    new = []
    for begin, end in sorted(after):
        for old_begin, old_end in sorted(before):
            if old_end <= begin or old_begin >= end:
                continue
            if old_begin > begin:
                new.append((begin, old_begin))
            begin = max(begin, old_end)
        new.append((begin, end))
    return [(begin, end) for begin, end in new if end - begin >= _LEAST]


def lockable() -> int | None:
    """How many bytes this process may lock; None: as many as there are."""
    if CAN_TELL_MEMORY and _may_lock_all():
        return None
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if most == resource.RLIM_INFINITY else most


def _may_lock_all() -> bool:
    """Whether it has the capability that no limit holds for, as root has it outside of containers."""
    with suppress(OSError, StopIteration, ValueError):
        lines = _STATUS.read_text().splitlines()
        held = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
        return bool(int(held, 16) >> _CAP_IPC_LOCK & 1)
    return False


def _pages(memory: Range) -> Range:
    begin, end = memory
    return begin // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


def _raise_limit() -> None:
    """To what this process may have without asking anyone."""
    import resource

    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))


def _call(function: str, memory: Range) -> None:
    """Raises OSError."""
    begin, end = memory
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
