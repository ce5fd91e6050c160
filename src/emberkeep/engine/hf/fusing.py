"""Small operations between the matrix products, compiled into few kernels while a decode step is recorded.

A recorded step does not run Python again, so nothing of the model stays changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_ROTATE = "apply_rotary_pos_emb"
"""What transformers calls the function in each of its model files that rotates queries and keys."""


@contextmanager
def fused(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within it, norms, feed-forward parts and rotations of these layers run compiled."""
    parts = [part for layer in layers for part in layer.children() if not hasattr(part, "layer_idx")]
    homes = {sys.modules[type(part).__module__] for layer in layers for part in layer.children()}
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for part in parts:
            _replace(replaced, part, "forward", _compiled(part.forward))
        for home in homes:
            if hasattr(home, _ROTATE):
                _replace(replaced, home, _ROTATE, _compiled(getattr(home, _ROTATE)))
        yield
    finally:
        for owner, name, before in reversed(replaced):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _replace(replaced: list[tuple[Any, str, Any]], owner: Any, name: str, by: Any) -> None:
    replaced.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, by)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled
