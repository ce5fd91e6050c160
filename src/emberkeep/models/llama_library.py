"""llama.cpp's shared library, fetched where none is installed."""

from __future__ import annotations

from pathlib import Path

from emberkeep.engine.llamacpp import choose
from emberkeep.engine.llamacpp.shared_library import AUTO, READY_MADE, is_installed, prebuilt
from emberkeep.errors import DownloadFailed, EngineError
from emberkeep.models.reporting import Reporter, Silent
from emberkeep.models.sources.npm import fetch_npm

_OTHERWISE = "`pip install 'emberkeep[native]'` compiles it instead, with a C++ compiler and some minutes"


def ensure_llama_library(choice: str = AUTO, reporter: Reporter | None = None) -> None:
    """Make sure that there is a library for `choice`, as the setting `llama_library` names it.

    Blocks while it downloads, some seconds. Raises EngineError with what to do instead.
    """
    if choice not in (AUTO, READY_MADE) or is_installed(choice):
        return
    package = prebuilt()
    if package is None:
        raise EngineError(f"There is no ready-made llama.cpp for this platform: {_OTHERWISE}.")
    (reporter or Silent()).say("Fetching llama.cpp, ready-made: 10 MB, and npm besides where there is none.")
    try:
        fetch_npm(package.package, package.version, package.integrity, package.libraries, package.folder)
    except DownloadFailed as error:
        raise EngineError(f"llama.cpp could not be fetched: {error} Try again; {_OTHERWISE}.") from error


def usable_library(choice: str = AUTO) -> Path:
    """The library that `choice` stands for, which is fetched if need be and was tried. Raises EngineError."""
    ensure_llama_library(choice)
    return choose(choice).path
