"""A model as transformers itself runs it, with nothing of ours in between: what the engine is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from emberkeep.engine.hf.device import chosen_device
from emberkeep.engine.hf.limits import synchronize
from emberkeep.engine.hf.loading import HfSource, load_model
from emberkeep.engine.hf.synthetic import Shape, random_network

Tokens = npt.NDArray[np.int32]

ATTENTION = "sdpa"
"""What transformers chooses where nobody does."""


class PlainModel:
    """Eager code, a cache that grows with every token. Belongs to one thread. Everything blocks."""

    def __init__(self, network: Any) -> None:
        self._network = network

    @classmethod
    def load(cls, source: HfSource, *, device: str, dtype: str) -> PlainModel:
        """Raises ModelBroken, EngineError."""
        return cls(load_model(source, device=device, dtype=dtype, attention=ATTENTION).network)

    @classmethod
    def random(cls, shape: Shape, device: str) -> PlainModel:
        """With the weights of `random_model`. Raises EngineError."""
        return cls(random_network(shape, chosen_device(device), ATTENTION))

    @torch.no_grad()
    def generate(self, prompt: Tokens, count: int) -> list[int]:
        """`transformers.generate`, greedy, without anything from an earlier call: the tokens after the prompt."""
        ids = torch.from_numpy(prompt.astype(np.int64)).to(self._network.device)[None]
        output = self._network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=0,
        )
        return [int(token) for token in output[0, len(prompt) :]]

    @torch.no_grad()
    def step_seconds(self, prompts: Sequence[Tokens], steps: int) -> list[float]:
        """Evaluate prompts of equal length together; then the time of each of so many greedy decode steps."""
        ids = torch.from_numpy(np.stack(prompts).astype(np.int64)).to(self._network.device)
        cache, seconds = DynamicCache(config=self._network.config), []
        chosen = self._step(ids, cache)
        for _ in range(steps):
            synchronize(ids.device)
            begin = perf_counter()
            chosen = self._step(chosen[:, None], cache)
            chosen.tolist()  # who writes the answer wants to know
            seconds.append(perf_counter() - begin)
        return seconds

    def _step(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        output = self._network(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1)
