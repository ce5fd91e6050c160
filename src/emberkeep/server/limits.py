"""Limits for clients: sizes, counts and times of HTTP itself."""

from __future__ import annotations

import sys

from emberkeep.config.settings import DRAIN_S
from emberkeep.values import dataclass

MOST_CONNECTIONS = 1000
_FILES_PER_CONNECTION = 2
"""Open files that the process may have for each connection: the store, memory and tools need some too."""


@dataclass(frozen=True, slots=True)
class Limits:
    connections: int = MOST_CONNECTIONS
    """At a time. Beyond them the one whose client has kept us waiting longest gives way."""
    spare_connections: int = 32
    """On top of these: if all are busy, others are still told so, and `/health` still answers."""
    head_bytes: int = 96 << 10
    """Path, query and headers: a question to the memory has up to 4096 characters, of 12 bytes each."""
    head_s: float = 10.0
    """From the first byte of a request, or from the connection, to the end of the headers."""
    body_bytes: int = 16 << 20
    """Several times the text of the longest contexts."""
    bodies_bytes: int = 256 << 20
    """Bodies of all requests that are being received or answered."""
    body_s: float = 20.0
    stalled_s: float = 30.0
    bytes_per_s: float = 16 << 10
    """A client gets `body_s` to send a body, `stalled_s` to read what waits for it, and another second for each of
    these."""
    unsent_bytes: int = 4 << 20
    """Bytes of a stream's events that wait because the client has not read earlier ones."""
    drain_s: float = DRAIN_S
    """Time that running requests get to finish when the server stops."""
    linger_s: float = 2.0
    """Time to read a refusal while the rest of what was refused still comes."""


def affordable(connections: int = MOST_CONNECTIONS) -> int:
    """No more than half of the files that this process may open: without one, nothing is answered."""
    if sys.platform == "win32":
        return connections
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return connections
    return max(1, min(connections, files // _FILES_PER_CONNECTION))
