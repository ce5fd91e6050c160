"""Taking the port, before anything slow happens."""

from __future__ import annotations

import errno
import socket

from emberkeep.errors import EmberkeepError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: clients that come while the model loads wait in its backlog. Raises EmberkeepError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise EmberkeepError(_why_not(error, host, port)) from error
    # Connections inherit it. asyncio, unlike uvloop, would not set it, and answers would wait 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use: stop the other server or choose --port."
    if error.errno == errno.EACCES:
        return f"Port {port} on {host} needs more rights: choose --port above 1023."
    return f"{host} is not an address of this machine: choose another --host."
