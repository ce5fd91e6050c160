"""What an open page asks its server for, without the page: `python -m emberkeep.bench.watcher PORT`, until killed.

It follows the events, and after each that tells something new, as often as the page does, reads what is kept, the
tree and the requests.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from http.client import HTTPConnection
from time import monotonic

_EVERY_S = 1.5
_READ = ("/v1/cache?limit=50", "/v1/cache/tree", "/v1/requests?limit=200")


def watch(port: int) -> None:
    """Prints a line once it watches. Returns when the server ends the events."""
    events = HTTPConnection("127.0.0.1", port)
    events.request("GET", "/v1/events")
    stream, due, is_new = events.getresponse(), 0.0, True
    for line in stream:
        if is_new:
            print("watching", flush=True)
            is_new = False
        if line.startswith(b"data:") and monotonic() >= due:
            due = monotonic() + _EVERY_S
            for path in _READ:
                _read(port, path)


def _read(port: int, path: str) -> None:
    asked = HTTPConnection("127.0.0.1", port)
    asked.request("GET", path)
    asked.getresponse().read()
    asked.close()


if __name__ == "__main__":
    with suppress(OSError, KeyboardInterrupt):  # the server has gone, or nobody wants to know any more
        watch(int(sys.argv[1]))
