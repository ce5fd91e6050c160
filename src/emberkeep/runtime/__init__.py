"""The composition root: a Config becomes running objects."""

from __future__ import annotations

from emberkeep.runtime.chain import backend_names, may_do_without_local, needs_local, open_backend
from emberkeep.runtime.local_model import assemble
from emberkeep.runtime.memory import open_memory
from emberkeep.runtime.parts import open_store
from emberkeep.runtime.served_models import begin_models, open_models
from emberkeep.runtime.tools import open_toolbox

__all__ = [
    "assemble",
    "backend_names",
    "begin_models",
    "may_do_without_local",
    "needs_local",
    "open_backend",
    "open_memory",
    "open_models",
    "open_store",
    "open_toolbox",
]
