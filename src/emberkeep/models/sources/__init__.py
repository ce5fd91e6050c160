"""Where models come from. Each source puts a model's files into a folder; none of them knows the library."""

from __future__ import annotations

from pathlib import Path

Fetched = tuple[Path, str | None]
"""A file, and the SHA-256 it must have where that is known."""
