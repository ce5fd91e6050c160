"""Which code computes an engine's steps: chosen when it is opened, because the bytes of its state depend on it.

On CUDA they are steps of ours (`cuda_graphs`), if the model can be computed so and gives what its authors' code
gives; else they are the model's own. What was chosen is remembered: the start after it compares nothing.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from emberkeep.engine.base import Capabilities, Logits, Rows
from emberkeep.engine.hf.attention import PoolStep
from emberkeep.engine.hf.network import LearningStep, Network
from emberkeep.engine.hf.pool import BLOCK, BlockTable, KvMemory
from emberkeep.engine.hf.step import Span
from emberkeep.engine.idle_steps import Steps
from emberkeep.errors import EngineError
from emberkeep.types.models import AttentionTier

if TYPE_CHECKING:
    from emberkeep.engine.hf.cuda_graphs import StepGraphs
    from emberkeep.engine.hf.fused_layers import FusedLayer
    from emberkeep.engine.hf.streaming import LayerStream

log = logging.getLogger("emberkeep.engine")

_COMPARED = 16
"""Tokens of which layers are computed in two ways."""
_PROMPT = 24
_FIRST_TOKENS = (3, 5)
"""Of the prompts of a comparison."""


class Reference:
    """What the model's own code gives for two prompts: computed once, when it is first asked for."""

    def __init__(self, network: Network, dtype: torch.dtype, able: Capabilities, vocab_size: int) -> None:
        self._network = network
        # Half precision rounds differently in every batch shape; what is wrong is not even similar.
        self._least = 1 - 1e-5 if dtype == torch.float32 else 0.98
        count = min(_PROMPT, able.cells // 2)
        self._prompts = [np.arange(first, first + count, dtype=np.int32) % vocab_size for first in _FIRST_TOKENS]

    def check(self, engine: Steps) -> None:
        """Two prompts, evaluated in slices beside each other by an engine that is empty, before and after.

        Raises EngineError where they give something else, and they are still there then.
        """
        count = len(self._prompts[0])
        for start, end in ((0, count // 2), (count // 2, count - 1), (count - 1, count)):
            engine.evaluate([Rows(s, start, prompt[start:end], 1) for s, prompt in enumerate(self._prompts)])
        for sequence, expected in enumerate(self._expected):
            if not np.corrcoef(engine.logits(sequence), expected)[0, 1] > self._least:
                raise EngineError("This model computes something else in a batch of several sequences.")
        for sequence in range(len(self._prompts)):
            engine.trim(sequence, 0)

    @cached_property
    def _expected(self) -> list[Logits]:
        """After the last token of each."""
        tokens = [torch.from_numpy(p.astype(np.int64)).to(self._network.device) for p in self._prompts]
        return [self._network.reference(each)[-1].float().cpu().numpy() for each in tokens]


def open_graphs(
    network: Network,
    memory: KvMemory,
    able: Capabilities,
    learned: LearningStep,
    stream: LayerStream | None,
    *,
    layers: str | None = None,
) -> StepGraphs | None:
    """Steps of ours, where this model's can be computed so. `layers`: what was found to compute them rightly;
    None: it is to be found out. Nothing may be in the pool."""
    if network.device.type != "cuda" or (stream is not None and not stream.can_record):
        return None
    try:
        # Needs Triton, which comes with torch for CUDA only.
        from emberkeep.engine.hf.cuda_graphs import StepGraphs, StepSize
        from emberkeep.engine.hf.kernels import check_assembler

        check_assembler(network.device)
        largest = StepSize(able.batch, able.outputs, able.max_sequences, -(-able.context // BLOCK))
        fused = None if stream or layers == "compiled" else fuse_layers(network, memory, learned, layers)
        return StepGraphs(network, memory, largest, learned.group, fused, stream)
    except Exception as error:
        log.warning("steps are not recorded and will be slower: %s", str(error).splitlines()[0])
        return None


def fuse_layers(
    network: Network, memory: KvMemory, learned: LearningStep, layers: str | None
) -> list[FusedLayer] | None:
    """What computes the layers with fewer kernels, if they are of the usual make."""
    from emberkeep.engine.hf.fused_layers import agree, fuse

    fused = fuse(network.layers, [learned.options[layer] for layer in range(len(learned.options))])
    if fused is None or layers == "fused":
        return fused
    rows = torch.arange(_COMPARED, device=network.device)
    step = PoolStep(memory, [Span(0, _COMPARED, BlockTable([0], _COMPARED), 0)], rows, tier=AttentionTier.PLAIN)
    return fused if agree(network.layers, fused, lambda: network.run(step, rows, rows, rows[:1])) else None
