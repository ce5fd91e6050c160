"""The model itself, run over batches that its own code knows nothing about."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from emberkeep.engine.hf.attention import NAME, AttentionOptions, StepCache, attend_plain, use_step
from emberkeep.engine.hf.pool import LayerShape, StreamShape
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

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


@dataclass(slots=True)
class LearningStep:
    """A step that keeps nothing: it finds out what the layers' keys and values look like.

    It evaluates one sequence without a past. `keys` are those of the latest run.
    """

    shapes: dict[int, LayerShape]
    options: dict[int, AttentionOptions]
    keys: dict[int, torch.Tensor]
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
        self.keys[layer] = keys[0].transpose(0, 1)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self.options[self.layer] = options
        self.group = max(self.group, query.shape[1] // keys.shape[1])
        count = query.shape[2]
        seen = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()
        return attend_plain(query, keys[0].transpose(0, 1), values[0].transpose(0, 1), seen, options)


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
    step = LearningStep({}, {}, {})
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
