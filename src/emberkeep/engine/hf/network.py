"""A model of transformers, run over batches that its own code knows nothing about.

Its layers call `attend` in place of their own attention, which is registered with transformers under the name
`emberkeep`: the step that runs takes keys and values, and attends. Which code computes that is the engine's
choice (`AttentionTier`); all of it reads keys and values from where they lie.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, PreTrainedModel

from emberkeep.engine.hf.pool import BlockTable, KvMemory, LayerShape, StreamShape
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
        self._picks_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, step: Any, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Logits of the rows `wanted`, in the model's dtype. `step` takes keys and values, and attends."""
        picked = {"logits_to_keep": wanted} if self._picks_logits else {}
        with use_step(step):
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                past_key_values=StepCache(step),
                use_cache=True,
                **picked,
            )
        logits: torch.Tensor = output.logits[0]
        return logits if self._picks_logits else logits[wanted]

    def reference(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of every token, computed as the model's authors wrote it."""
        self.model.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self.model(input_ids=tokens[None], use_cache=False).logits[0]
            return logits
        finally:
            self.model.set_attn_implementation(NAME)


# ── the batch, and attention over it ──


@dataclass(frozen=True, slots=True)
class Span:
    """The rows [begin, end) of the batch: tokens of one sequence, in order of their positions."""

    begin: int
    end: int
    table: BlockTable
    start: int
    """The first token's position."""
    positions: torch.Tensor | None = None
    """Given for every token where they do not follow each other."""

    @property
    def last(self) -> int:
        """Every token sees positions before this one only."""
        return self.start + (self.end - self.begin) if self.positions is None else int(self.positions[-1]) + 1


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
    _located: dict[tuple[int, int], slice | torch.Tensor] = field(default_factory=dict)
    """Where the cells of a span are, by its first row and the first position wanted: the same in most layers."""

    def pick(self, rows: torch.Tensor) -> torch.Tensor:
        """From now on only these rows of the one sequence are there: their positions."""
        (span,) = self.spans
        positions = span.start + rows
        self.spans = [Span(0, len(rows), span.table, int(positions[0]), positions)]
        self.cells = self.cells[rows]
        self._located.clear()
        return positions

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take a layer's `[1, heads, tokens, width]`."""
        self.layer = layer
        self.memory.keys[layer].index_copy_(0, self.cells, keys[0].transpose(0, 1))
        self.memory.values[layer].index_copy_(0, self.cells, values[0].transpose(0, 1))

    def attend(self, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """`[tokens, heads, width]` of every row, span by span."""
        parts = [self._attend_span(span, query[:, :, span.begin : span.end], options) for span in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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

    def __init__(self, step: Any) -> None:
        super().__init__(layers=[])
        self.step = step

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


KNOWN = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "position_ids", "cache_position"}
"""What models hand to attention; dropout, positions and their cache change nothing here."""

_running = threading.local()


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks of its attention."""

    scale: float
    window: int | None = None
    """Tokens that a token sees, itself included; None: all."""
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """Per head, a score that takes part in the softmax and belongs to no token."""

    @classmethod
    def read(cls, given: Mapping[str, Any], width: int) -> AttentionOptions:
        """From what transformers hands to attention by name, for heads of `width`.

        Raises EngineError for a tensor that is not known here: it may change what is computed.
        """
        if unknown := [name for name, o in given.items() if isinstance(o, torch.Tensor) and name not in KNOWN]:
            raise EngineError(
                f"This model's attention takes arguments that are not known here: {', '.join(unknown)}."
            )
        scaling = given.get("scaling")
        scale = width**-0.5 if scaling is None else float(scaling)
        return cls(scale, given.get("sliding_window"), given.get("softcap"), given.get("s_aux"))

    def first_seen(self, position: int) -> int:
        return max(position - self.window + 1, 0) if self.window else 0

    @property
    def is_plain_only(self) -> bool:
        return self.softcap is not None or self.sinks is not None


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


def visible(span: Span, first: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which keys (from position `first` on) each token of the span sees; None: all."""
    if span.end - span.begin == 1:
        return None
    if span.positions is None:
        queries = torch.arange(span.start, span.last, device=device)[:, None]
    else:
        queries = span.positions[:, None]
    keys = torch.arange(first, span.last, device=device)[None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def attend_flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    span: Span,
    first: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """By torch's own kernels: flash attention where the device has it."""
    count = span.end - span.begin
    is_whole = span.positions is None and count == len(keys) and not (options.window and count > options.window)
    mask = None if is_whole or count == 1 else _bias(span, first, options.window, query.device)
    mixed = scaled_dot_product_attention(
        query,
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=is_whole and count > 1,
        scale=options.scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return mixed[0].transpose(0, 1)


def _bias(span: Span, first: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    if device.type == "cuda" and span.positions is None and window is None:
        # Said in two numbers: no mask is written, and the fastest kernel can be used.
        return causal_lower_right(span.end - span.begin, span.last - first)
    return visible(span, first, window, device)


def attend_plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """By two matrix products and a softmax in float32: any device, and everything a layer may ask for."""
    heads, count = query.shape[1], query.shape[2]
    groups = heads // keys.shape[1]
    grouped = query[0].unflatten(0, (keys.shape[1], groups))
    scores = torch.einsum("hgqd,khd->hgqk", grouped, keys).float() * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(keys.shape[1], groups, 1, 1).expand(-1, -1, count, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)].to(values.dtype)
    return torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)


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
