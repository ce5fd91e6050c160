"""The one place where llama.cpp is brought up: backend, log, errors."""

from __future__ import annotations

import ctypes
import functools
import logging
import re

from emberkeep.engine.llamacpp import api
from emberkeep.engine.llamacpp.shared_library import llama, used

log = logging.getLogger("emberkeep.llamacpp")

_LEVELS = {2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
_recent_errors: list[str] = []
_BUFFER = re.compile(r"buffer size =\s*([\d.]+) MiB")
_buffers: list[float] = []


@api.LogCallback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    line = text.decode("utf-8", "replace").rstrip()
    if level == 4 and line:
        _recent_errors.append(line)
        del _recent_errors[:-8]
    if found := _BUFFER.search(line):
        _buffers.append(float(found[1]))
    # llama.cpp tells the caller the same through return codes: its own words are for debugging.
    if level in _LEVELS and line and log.isEnabledFor(logging.DEBUG):
        log.debug("%s", line)


@functools.cache
def start() -> None:
    """Bring llama.cpp up once per process. Its log goes to our debug log."""
    llama().llama_log_set(_on_log, ctypes.c_void_p(0))
    if not llama().ggml_backend_dev_count():
        # Its backends are in files of their own, of which it chooses those that fit this CPU best.
        llama().ggml_backend_load_all_from_path(str(used().path.parent).encode())
    llama().llama_backend_init()


def take_errors() -> str:
    """What llama.cpp first complained about since the last call: what follows is its callers passing it on."""
    first = _recent_errors[0] if _recent_errors else ""
    _recent_errors.clear()
    # It begins with the name of a C function.
    return re.sub(r"^\w+: ", "", first).rstrip(".")


def take_buffers() -> int:
    """Bytes that llama.cpp said it allocated since the last call: it tells nobody but its log."""
    total = sum(_buffers)
    _buffers.clear()
    return int(total * (1 << 20))


def system_info() -> str:
    """llama.cpp's list of CPU features and backends it was built with."""
    start()
    info: bytes = llama().llama_print_system_info()
    return info.decode().strip()


def version() -> str:
    said: bytes = llama().llama_version()
    return said.decode()
