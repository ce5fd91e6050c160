"""LoRA adapters, as `--lora FILE[:SCALE]` and `lora = [...]` name them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emberkeep.types import Json


@dataclass(frozen=True, slots=True)
class LoraFile:
    path: Path
    scale: float = 1.0

    def __str__(self) -> str:
        return str(self.path) if self.scale == 1 else f"{self.path}:{self.scale:g}"


def parse_loras(value: object) -> tuple[LoraFile, ...]:
    """Raises ValueError."""
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, Path) else value
    if not isinstance(parts, (list, tuple)):
        raise ValueError
    return tuple(_parse_lora(part) for part in parts if part != "")


def _parse_lora(value: object) -> LoraFile:
    if isinstance(value, Path):
        return LoraFile(value.expanduser())
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    path, colon, scale = value.strip().rpartition(":")
    try:
        number = float(scale)
    except ValueError:
        return LoraFile(Path(value.strip()).expanduser())  # a path may hold colons
    if not path or not colon or not math.isfinite(number):
        raise ValueError
    return LoraFile(Path(path).expanduser(), number)


def settle_loras(files: Sequence[LoraFile], base: Path) -> tuple[LoraFile, ...]:
    return tuple(replace(file, path=base / file.path) for file in files)


def show_loras(files: Sequence[LoraFile]) -> str:
    return ", ".join(map(str, files)) or "none"


def public_loras(files: Sequence[LoraFile]) -> Json:
    return [str(file) for file in files]
