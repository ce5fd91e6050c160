"""What every engine asks before it splices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from emberkeep.engine.base import Capabilities
from emberkeep.errors import EngineError


def check_splice(
    capabilities: Capabilities, length: int, start: int, end: int, insert: npt.NDArray[np.int32]
) -> None:
    """Raises EngineError unless [start, end) of a sequence of `length` tokens can give way to `insert`."""
    if not capabilities.can_shift:
        raise EngineError("Nothing can be cut out of this model's state.")
    if not 0 <= start < end <= length:
        raise EngineError(f"Nothing from {start} to {end} can be cut out of a sequence of {length} tokens.")
    if not len(insert):
        raise EngineError("What is cut out of a sequence must give way to one token at least.")
