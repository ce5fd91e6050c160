"""What is wrong with arguments, said so that a model can correct them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

_SHOWN = 5
"""Who is told more corrects less."""


def faults(error: ValidationError, known: Sequence[str]) -> str:
    """`known`: the names of all parameters."""
    found = error.errors(include_url=False)
    told = [_fault(fault, known) for fault in found[:_SHOWN]]
    more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
    return f"{'; '.join(told)}{more}"


def _fault(fault: Any, known: Sequence[str]) -> str:
    place = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
        return f"there is no {place} ({_instead(place, known)})"
    if fault["type"] == "missing":
        return f"{place} is missing"
    return f"{place or 'they'}: {fault['msg']}"


def _instead(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'nothing'}"
