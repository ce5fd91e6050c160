"""Which experts of a mixture are chosen, seen by hooks on the modules that are told which ones to use.

Families differ in how they choose. What they have in common is a module `experts` that is handed the numbers of
the chosen ones, `[tokens, used]`; where it is handed none, the router beside it has scores, and the highest are
taken. Hooks count on the device, so that a recorded step counts whenever it is replayed. A model that is not
watched has no hooks, and its recorded steps have nothing of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from emberkeep.engine.hf.network import running_step
from emberkeep.types.models import ExpertStats, LayerExperts
from emberkeep.values import dataclass

_EXPERTS, _ROUTERS = "experts", ("router", "gate")
"""What models call these modules."""
_LAYER = re.compile(r"\.(\d+)\.")
Seen = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Where the experts of one layer are chosen."""

    layer: int
    experts: int
    module: nn.Module
    router_takes: int | None = None
    """The highest of a router's scores: so many; None: the module is handed numbers."""

    def watch(self, seen: Seen) -> Any:
        """A hook, which calls `seen` with what is chosen in each step, `[tokens, used]`."""
        if self.router_takes is None:
            return self.module.register_forward_pre_hook(
                lambda _, given, named: _call(seen, _numbers([*given, *named.values()])), with_kwargs=True
            )
        return self.module.register_forward_hook(lambda _, given, result: _call(seen, self._highest(result)))

    def _highest(self, result: Any) -> torch.Tensor | None:
        parts = result if isinstance(result, tuple) else (result,)
        scores = [part for part in parts if isinstance(part, torch.Tensor) and part.shape[-1] == self.experts]
        return scores[-1].flatten(0, -2).topk(self.router_takes or 1).indices if scores else None


class HookExpertCounter:
    """See `ExpertTracking` for the contracts. `record` empties the engine and records its steps anew."""

    def __init__(
        self, choices: Sequence[_Choice], used: int | None, device: torch.device, record: Callable[[], None]
    ) -> None:
        self._choices = choices
        self._layers = [(choice.layer, choice.experts) for choice in choices]
        self._used = used
        self._record = record
        self._experts = max(choice.experts for choice in choices)
        # Per layer and expert how many tokens chose it; then numbers of no expert, and the tokens. Recorded steps
        # write to it, so it stays where it is.
        self._step = torch.zeros((len(choices), self._experts + 2), dtype=torch.int64, device=device)
        self._totals: npt.NDArray[np.int64] = self._step.cpu().numpy().copy()
        self._hooks: list[Any] = []

    @classmethod
    def of(
        cls, network: nn.Module, device: torch.device, run: Callable[[], object], record: Callable[[], None]
    ) -> HookExpertCounter | None:
        """None for a model without experts to choose from. `run`: evaluates a few tokens."""
        found = list(_candidates(network))
        if not found:
            return None
        used: dict[int, int] = {}
        hooks = [choice.watch(_note_used(used, number)) for number, choice in enumerate(found)]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        numbered = {found[number].layer for number in used if found[number].router_takes is None}
        for number, choice in enumerate(found):
            if choice.router_takes is not None and choice.layer in numbered:
                used.pop(number, None)
        choices, each = [found[number] for number in sorted(used)], set(used.values())
        return cls(choices, each.pop() if len(each) == 1 else None, device, record) if choices else None

    @property
    def enabled(self) -> bool:
        return bool(self._hooks)

    def track(self, enabled: bool) -> None:
        if enabled == self.enabled:
            return
        if enabled:
            self._hooks = [choice.watch(self._counting(at)) for at, choice in enumerate(self._choices)]
        else:
            self._unhook()
        with self.pausing():  # steps are tried when they are recorded
            self._record()

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Steps within it are not counted."""
        counted = self._totals
        try:
            yield
        finally:
            self._totals = counted
            self._step.zero_()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def reset(self) -> None:
        self._totals = np.zeros_like(self._totals)

    def stats(self) -> ExpertStats:
        totals = self._totals
        layers = tuple(
            LayerExperts(layer, int(row[-1]), tuple(row[:experts].tolist()))
            for (layer, experts), row in zip(self._layers, totals, strict=True)
            if row[-1]
        )
        return ExpertStats(self.enabled, self._experts, self._used, layers)

    def step_done(self) -> None:
        """Count what was seen since the last call. Blocks until it is there; cheap when nothing is watched."""
        if self._hooks:
            # One assignment of a new array: readers need no lock, and see all layers after the same step.
            self._totals = self._totals + self._step.cpu().numpy()
            self._step.zero_()

    def step_failed(self) -> None:
        """Forget what was seen since the last step that was done."""
        if self._hooks:
            self._step.zero_()

    def close(self) -> None:
        """Let go of the model. What was counted can still be asked for."""
        self._unhook()
        self._choices, self._record = (), lambda: None

    def _counting(self, at: int) -> Seen:
        counts, none = self._step[at], self._experts

        def count(chosen: torch.Tensor) -> None:
            # A recorded step may have room for more rows than are tokens.
            rows, live = len(chosen), getattr(running_step(), "live", None)
            if live is None:
                tokens = torch.ones(rows, dtype=torch.int64, device=chosen.device)
            else:
                tokens = (torch.arange(rows, device=chosen.device) < live).long()
            counts.scatter_add_(
                0, chosen.flatten().long().clamp(max=none), tokens.repeat_interleave(chosen.shape[1])
            )
            counts[-1] += tokens.sum()

        return count


def _candidates(network: nn.Module) -> Iterator[_Choice]:
    """The experts of every layer, each followed by its router."""
    for name, module in network.named_modules():
        count = getattr(module, "num_experts", None)
        if name.rpartition(".")[2] != _EXPERTS or not isinstance(count, int) or count < 2:
            continue
        number = _LAYER.search(f".{name}.")
        layer = int(number.group(1)) if number else 0
        router = _router(network.get_submodule(name.rpartition(".")[0]))
        takes = getattr(router, "top_k", None)
        yield _Choice(layer, count, module)
        if router is not None and isinstance(takes, int):
            yield _Choice(layer, count, router, takes)


def _router(owner: nn.Module) -> nn.Module | None:
    found = (getattr(owner, name, None) for name in _ROUTERS)
    return next((module for module in found if isinstance(module, nn.Module)), None)


def _numbers(given: Sequence[Any]) -> torch.Tensor | None:
    """The numbers of experts among what a module is handed."""
    tensors = (value for value in given if isinstance(value, torch.Tensor))
    return next((t.flatten(0, -2) for t in tensors if t.ndim > 1 and not t.is_floating_point()), None)


def _note_used(used: dict[int, int], number: int) -> Seen:
    def note(chosen: torch.Tensor) -> None:
        used[number] = chosen.shape[1]

    return note


def _call(seen: Seen, chosen: torch.Tensor | None) -> None:
    """A hook that gave something back would replace what it has seen."""
    if chosen is not None:
        seen(chosen)
