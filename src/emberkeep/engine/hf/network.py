"""A model of transformers, run over batches that its own code knows nothing about.

Its layers call `attend` in place of their own attention, which is registered with transformers under the name
`emberkeep`: the step that runs takes keys and values, and attends. Which code computes that is the engine's
choice (`AttentionTier`); all of it reads keys and values from where they lie.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any, ClassVar

import torch
from transformers import AttentionInterface, Cache, PreTrainedModel

from emberkeep.engine.hf.attention import (
    AttentionOptions,
    Crowd,
    Span,
    attend_crowd,
    attend_flash,
    attend_plain,
    find_crowds,
    visible,
)
from emberkeep.engine.hf.pool import KvMemory, LayerShape, StreamShape
from emberkeep.errors import EngineError
from emberkeep.types.models import AttentionTier
from emberkeep.values import dataclass

NAME = "emberkeep"
"""The attention here, as transformers knows it."""
_LEARNED_TOKENS = 4


def has_choice(model: PreTrainedModel) -> bool:
    """Whether `set_attn_implementation` changes which code computes the model's attention."""
    return bool(model._can_set_attn_implementation())


class Network:
    """Belongs to the engine's thread."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises EngineError for a model whose attention cannot be replaced."""
        if not has_choice(model):
            raise EngineError("This model computes attention in its own way.")
        model.set_attn_implementation(NAME)
        self.model = model
        self.device: torch.device = model.device
        self.layers: list[torch.nn.Module] = []
        """From the first to the last, once it is known how many there are."""
        self.own_layers: Sequence[Callable[..., torch.Tensor]] | None = None
        """What computes them over the pool; None: their own code."""
        self._picks_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, step: Any, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Logits of the rows `wanted`, in the model's dtype. `step` takes keys and values, and attends."""
        picked = {"logits_to_keep": wanted} if self._picks_logits else {}
        with use_step(step), self._replaced_layers():
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                past_key_values=StepCache(step, wanted),
                use_cache=True,
                **picked,
            )
        logits: torch.Tensor = output.logits[0]
        return logits if self._picks_logits else logits[wanted]

    @contextmanager
    def _replaced_layers(self) -> Iterator[None]:
        if self.own_layers is None:
            yield
            return
        for layer, own in zip(self.layers, self.own_layers, strict=True):
            layer.forward = own
        try:
            yield
        finally:
            for layer in self.layers:
                vars(layer).pop("forward", None)

    def reference(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of every token, computed as the model's authors wrote it."""
        self.model.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self.model(input_ids=tokens[None], use_cache=False).logits[0]
            return logits
        finally:
            self.model.set_attn_implementation(NAME)


# ── the batch, and attention over it ──


@dataclass(slots=True)
class Step:
    """A batch of tokens whose keys and values go into the pool, and that attends to what is there."""

    memory: KvMemory
    spans: Sequence[Span]
    cells: torch.Tensor
    """Where each row's keys and values go."""
    tier: AttentionTier = AttentionTier.PLAIN
    layer: int = -1
    """The one that attention is computed in: its keys and values have just been written."""
    normed: torch.Tensor | None = None
    """What the layer before has computed of the next one, if it has (`fused_layers`)."""
    live: ClassVar[torch.Tensor | None] = None
    """How many rows are tokens; None: all."""
    _crowds: tuple[Sequence[Crowd], Sequence[Span]] | None = None
    _located: dict[tuple[int, int], slice | torch.Tensor] = field(default_factory=dict)
    """Where the cells of a span are, by its first row and the first position wanted: the same in most layers."""

    def pick(self, rows: torch.Tensor) -> torch.Tensor:
        """From now on only these rows of the one sequence are there: their positions."""
        (span,) = self.spans
        positions = span.start + rows
        self.spans = [Span(0, len(rows), span.table, int(positions[0]), positions)]
        self.cells = self.cells[rows]
        self._located.clear()
        self._crowds = None
        return positions

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take a layer's `[1, heads, tokens, width]`."""
        self.store(layer, keys[0].transpose(0, 1), values[0].transpose(0, 1))

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take a layer's `[tokens, heads, width]`."""
        self.layer = layer
        self.memory.keys[layer].index_copy_(0, self.cells, keys)
        self.memory.values[layer].index_copy_(0, self.cells, values)

    def attend(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """`[tokens, heads, width]` of every row."""
        crowds, spans = self._crowds_for(options)
        parts = [self._attend_span(span, query[:, :, span.begin : span.end], options) for span in spans]
        if not crowds:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        keys, values = self.memory.keys[self.layer], self.memory.values[self.layer]
        if crowds[0].rows is None:
            return attend_crowd(query, keys, values, crowds[0], options, self.memory.scratch)
        mixed = query.new_empty((query.shape[2], query.shape[1], values.shape[2]))
        for span, part in zip(spans, parts, strict=True):
            mixed[span.begin : span.end] = part
        for crowd in crowds:
            mixed[crowd.rows] = attend_crowd(query, keys, values, crowd, options, self.memory.scratch)
        return mixed

    def _crowds_for(self, options: AttentionOptions) -> tuple[Sequence[Crowd], Sequence[Span]]:
        """Spans that are computed together, and all others."""
        has_crowds = self.tier is AttentionTier.FLASH and self.cells.device.type == "cpu"
        if not has_crowds or options.window or options.is_plain_only:
            return (), self.spans
        if self._crowds is None:
            self._crowds = find_crowds(self.spans, self.memory.dtype)
        return self._crowds

    def _attend_span(self, span: Span, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        first = options.first_seen(span.start)
        keys, values = self._read(span, first)
        if self.tier is AttentionTier.PLAIN or options.is_plain_only:
            return attend_plain(query, keys, values, visible(span, first, options.window, query.device), options)
        return attend_flash(query, keys, values, span, first, options)

    def _read(self, span: Span, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values from position `first` on, as `[tokens, heads, width]`.

        Views where a sequence's blocks lie together, copies where they do not.
        """
        keys, values = self.memory.keys[self.layer], self.memory.values[self.layer]
        located = self._located.get((span.begin, first))
        if located is None:
            located = self._located[span.begin, first] = self._locate(span, first)
        if isinstance(located, slice):
            return keys[located], values[located]
        return keys.index_select(0, located), values.index_select(0, located)

    def _locate(self, span: Span, first: int) -> slice | torch.Tensor:
        begin = span.table.run(first, span.last)
        if begin is not None:
            return slice(begin, begin + span.last - first)
        return torch.from_numpy(span.table.cells(first, span.last)).to(self.cells.device)


class StepCache(Cache):
    """What a model is given as its cache: it says which layer comes, and hands on what attention is given."""

    def __init__(self, step: Any, wanted: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.step = step
        self.wanted = wanted
        """The rows of which there are to be logits."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Not written yet: some models keep something smaller in their caches, of which they make keys and values.
        self.step.layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # There is no one length: a model that asks for it computes with something else than tokens' positions.
        raise EngineError(
            "This model asks how long its cache is, which a batch of several sequences cannot answer."
        )


_running = threading.local()


@contextmanager
def use_step(step: Any) -> Iterator[None]:
    """`step.attend` computes the attention of models that run on this thread."""
    _running.step = step
    try:
        yield
    finally:
        _running.step = None


def running_step() -> Any | None:
    """The one of this thread's model, while it runs in one."""
    return getattr(_running, "step", None)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Compute it for `[1, heads, tokens, width]` queries, as `[1, tokens, heads, width]`. Raises EngineError."""
    options = AttentionOptions.read({"attention_mask": attention_mask, **given}, query.shape[-1])
    step = _running.step
    step.write(step.layer, key, value)
    return step.attend(query, options)[None], None


AttentionInterface.register(NAME, attend)


class Tiers:
    """Which code computes attention: what there is on a device, and which of it is in use.

    See `AttentionTiers`. The fastest one is used unless another was asked for.
    """

    def __init__(self, device: torch.device, wanted: AttentionTier | None) -> None:
        own = (AttentionTier.OWN,) if device.type == "cuda" else ()
        self.available: tuple[AttentionTier, ...] = (*own, AttentionTier.FLASH, AttentionTier.PLAIN)
        self.tier = self.available[0]
        if wanted is not None:
            self.switch(wanted)

    def switch(self, tier: AttentionTier) -> None:
        if tier not in self.available:
            there = ", ".join(self.available)
            raise EngineError(f"There is no attention of the tier {tier} on this device: choose one of {there}.")
        self.tier = tier


# ── what a model is like ──


@dataclass(slots=True)
class LearningStep:
    """A step that keeps nothing: it finds out what the layers' keys and values look like.

    It evaluates one sequence without a past.
    """

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    options: dict[int, AttentionOptions] = field(default_factory=dict)
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: torch.Tensor | None = None
    layer: int = -1
    dtype: torch.dtype = torch.float32
    group: int = 1
    """Query heads per KV head, at most."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.shape[0] != 1 or keys.dtype != values.dtype:
            raise EngineError("This model's keys and values have a shape that is not known here.")
        self.layer, self.dtype = layer, keys.dtype
        self.shapes[layer] = LayerShape(
            StreamShape(keys.shape[1], keys.shape[3]), StreamShape(values.shape[1], values.shape[3])
        )
        self.keys[layer], self.values = keys[0].transpose(0, 1), values[0].transpose(0, 1)

    def attend(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        keys, values, count = self.keys[self.layer], self.values, query.shape[2]
        assert values is not None
        self.options[self.layer] = options
        self.group = max(self.group, query.shape[1] // keys.shape[1])
        seen = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()
        return attend_plain(query, keys, values, seen, options)

    @property
    def layers(self) -> list[LayerShape]:
        return [self.shapes[layer] for layer in range(len(self.shapes))]


def learn(network: Network) -> LearningStep:
    """Run a few tokens and look. Raises EngineError for a model whose state is not only attention."""
    tokens = torch.arange(1, 1 + _LEARNED_TOKENS, device=network.device)
    try:
        step = probe(network, tokens, torch.arange(_LEARNED_TOKENS, device=network.device))
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise EngineError(f"This model wants a cache of its own: {error}.") from error
    if sorted(step.shapes) != list(range(len(step.shapes))) or not step.shapes:
        raise EngineError("Some of this model's layers keep no keys and values.")
    if len(step.options) != len(step.shapes):
        raise EngineError("Some of this model's layers compute attention in their own way.")
    _check_layer_types(network.model.config.get_text_config(), step)
    network.layers = _find_layers(network.model, len(step.shapes))
    return step


def probe(network: Network, tokens: torch.Tensor, positions: torch.Tensor) -> LearningStep:
    step = LearningStep()
    network.run(step, tokens, positions, torch.arange(0, device=network.device))
    return step


def _find_layers(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return next((list(layers) for layers in lists if len(layers) == count), [])


def _check_layer_types(config: Any, step: LearningStep) -> None:
    """A few tokens do not show how far a layer sees: what the configuration says must have reached attention."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(step.shapes)
    for layer, kind in enumerate(kinds[: len(step.shapes)]):
        if kind not in ("full_attention", "sliding_attention", "attention"):
            raise EngineError(f"This model has layers of the kind {kind}.")
        if kind == "sliding_attention" and step.options[layer].window is None:
            raise EngineError("How far this model's layers see is not known here.")
    if getattr(config, "attention_chunk_size", None):
        raise EngineError("This model's layers see chunks of the text only.")
