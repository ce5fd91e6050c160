"""Which definitions of tools were approved: those of a server's first use, and later ones that a user approved.

A server that says something else afterwards does not get it past the user."""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Iterable, Mapping
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path

from emberkeep.files import locked, private_folder, replace_file
from emberkeep.mcp.answers import ListedTool

log = logging.getLogger("emberkeep.mcp")

_Digests = dict[str, dict[str, str]]
"""The digests of each server's tools, by their names."""


class Standing(StrEnum):
    APPROVED = "approved"
    CHANGED = "changed"
    NEW = "new"


class Pins:
    """A file that processes share. Every method blocks for a moment on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._digests: _Digests | None = {}
        """None: the file cannot be understood, so nothing is approved."""

    def standings(self, server: str, tools: Iterable[ListedTool]) -> dict[str, Standing]:
        """How each tool stands, by its name. All tools of a server that was never seen are new."""
        self._refresh()
        known = (self._digests or {}).get(server, {})
        return {tool.name: _standing(known.get(tool.name), tool) for tool in tools}

    def meet(self, server: str, tools: Iterable[ListedTool], named: Container[str]) -> None:
        """Approve the tools of a server that was never seen; of one that was, new tools that are `named` in its
        settings, because the user has asked for them."""
        with self._lock():
            self._refresh()
            if self._digests is None:
                return
            known = self._digests.get(server)
            asked = [t for t in tools if known is None or (t.name in named and t.name not in known)]
            if known is None or asked:
                self._write({**self._digests, server: (known or {}) | _digests(asked)})

    def approve(self, server: str, tools: Iterable[ListedTool]) -> None:
        """Approve what is said now. Raises OSError."""
        with self._lock():
            self._refresh()
            known = (self._digests or {}).get(server, {})
            self._write({**(self._digests or {}), server: known | _digests(tools)}, strict=True)

    def _write(self, digests: _Digests, *, strict: bool = False) -> None:
        self._digests = digests
        try:
            replace_file(self._path, json.dumps({"servers": digests}, indent=1, sort_keys=True).encode())
            self._stamp = self._stat()
        except OSError as error:
            if strict:
                raise
            log.warning("what MCP servers offer is approved until the end only: %s", error)

    def _refresh(self) -> None:
        stamp = self._stat()
        if stamp is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = _check_form(json.loads(self._path.read_bytes()))
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.warning(
                "no MCP tool is used until it is approved again: %s cannot be read (%s)", self._path, error
            )
            self._digests = None

    def _stat(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def _lock(self) -> ExitStack:
        """Others may be writing: none of what was approved may get lost."""
        held = ExitStack()
        try:
            private_folder(self._path.parent)
            held.enter_context(locked(self._path.with_suffix(".lock")))
        except OSError as error:
            log.debug("no lock for %s: %s", self._path, error)
        return held


def _standing(pinned: str | None, tool: ListedTool) -> Standing:
    if pinned is None:
        return Standing.NEW
    return Standing.APPROVED if pinned == tool.digest else Standing.CHANGED


def _digests(tools: Iterable[ListedTool]) -> dict[str, str]:
    return {tool.name: tool.digest for tool in tools}


def _check_form(content: Mapping[str, object]) -> _Digests:
    servers = content["servers"]
    if not isinstance(servers, dict) or not all(isinstance(tools, dict) for tools in servers.values()):
        raise ValueError("it has another form")
    return servers
