"""From a folder (config.json, safetensors, tokenizer) or a GGUF file to a model on its device, and what its state
depends on.

Nothing of what is loaded is code: no pickles, no scripts of the folder's own. What torch and transformers raise
is translated here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from emberkeep.config.machine import cpu_facts
from emberkeep.engine.facts import Stored, known_as
from emberkeep.engine.hf.checkpoint import Checkpoint, awq_format, place_layers
from emberkeep.engine.hf.device import choose_device, choose_dtype, kv_bytes_per_token, shares_ram, weights_budget
from emberkeep.engine.hf.panels import has_panels, pack
from emberkeep.engine.hf.quantize import int4_count, round_layers, rounded_count, weights_bytes
from emberkeep.engine.hf.residency import Placing
from emberkeep.engine.hf.streaming import LayerStream
from emberkeep.engine.hf.vocab import HfVocab, gguf_adds_bos, gguf_ends, read_quickly, repair_gguf_tokenizer
from emberkeep.engine.locked_memory import Range
from emberkeep.errors import EmberkeepError, EngineError, ModelBroken
from emberkeep.types.models import AttentionTier, Quantization
from emberkeep.types.request import Json
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.engine")

_CONTEXT_IF_UNKNOWN = 32_768


@dataclass(frozen=True, slots=True)
class HfSource:
    folder: Path
    gguf: str | None = None
    """The name of a GGUF file in the folder, or of its first part; None: the folder itself is the model."""
    facts: Mapping[str, Json] = field(default_factory=dict)
    """What a GGUF file says: its `tokenizer.ggml.*` without that prefix, as far as they are single values."""
    rest: tuple[Path, ...] = ()
    """The other parts of a split GGUF file, by number."""

    @property
    def name(self) -> str:
        return self.gguf or self.folder.name


@dataclass(frozen=True, slots=True)
class HfModel:
    network: Any
    """A causal LM of transformers on its device, for inference only."""
    vocab: HfVocab
    chat_template: str | None
    context_length: int
    architecture: str
    parameters: int
    weights_bytes: int
    kv_bytes_per_token: int
    """As the configuration says, 0 where it does not; the engine knows better once it runs."""
    dtype: str
    device: str
    stream: LayerStream | None = None
    """What brings the weights that do not stay on the device; None: all do."""
    quantization: Quantization = Quantization.NONE
    """What the weights of its layers were rounded to when they were loaded."""

    def memory(self) -> list[Range]:
        """Where in RAM the weights are, of a model on the CPU."""
        weights = (*self.network.parameters(), *self.network.buffers())
        storages = [weight.untyped_storage() for weight in weights]
        return sorted({(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages})

    def close(self) -> None:
        """Give back what waits in RAM and on disk. An engine over the model does so when it is closed."""
        if self.stream is not None:
            self.stream.close()


@dataclass(frozen=True, slots=True)
class HfSettings:
    """How an engine over a model is set up."""

    context: int
    """Longest sequence."""
    cells: int | None
    """Token cells for all sequences; None: what the device has room for."""
    sequences: int
    batch: int
    """Most tokens per step."""
    attention: AttentionTier | None = None
    """None: the fastest that there is."""
    threads: int | None = None
    gpu_memory: int | None = None
    """Most bytes of a GPU; None: what is free."""
    chunk: int = 128
    """Tokens of the payloads that there will be most of: their memory is prepared for fast copies."""
    facts: Path | None = None
    """A folder with what was learned of models; None: nothing is remembered."""
    stored: Stored | None = None
    """None: nothing is, or not by a fingerprint of before."""


def load_model(
    source: HfSource,
    *,
    device: str,
    dtype: str,
    attention: str,
    placing: Placing | None = None,
    quantization: Quantization = Quantization.NONE,
) -> HfModel:
    """`attention` is the name that an implementation is registered under with transformers.

    Blocks. Raises ModelBroken for what cannot be loaded, EngineError for what this machine does not have.
    """
    target = choose_device(device)
    with translate_errors(source, target), quiet(), read_quickly(source.rest) if source.gguf else nullcontext():
        config = AutoConfig.from_pretrained(source.folder, **local_files(source))
        form = _LoadedForm(choose_dtype(dtype, target, own_dtype(source, config)), attention, quantization)
        network, stream = _placed_network(source, config, target, form, (placing or Placing()).settled())
        tokenizer = load_tokenizer(source)
        vocab = _vocab(source, tokenizer, network)
        parameters = sum(weight.numel() for weight in network.parameters()) + rounded_count(network)
        if stream is None:
            pack(network)
        text = network.config.get_text_config(decoder=True)
    return HfModel(
        network=network,
        vocab=vocab,
        chat_template=_template(tokenizer),
        context_length=_context_length(text),
        architecture=str(network.config.model_type),
        parameters=parameters,
        weights_bytes=weights_bytes(network),
        kv_bytes_per_token=kv_bytes_per_token(text, network.dtype),
        dtype=str(network.dtype).removeprefix("torch."),
        device=str(target),
        stream=stream,
        quantization=quantization,
    )


def local_files(source: HfSource) -> dict[str, Any]:
    """Only what lies in the folder, and none of it is run."""
    files = {"local_files_only": True, "trust_remote_code": False}
    return files | {"gguf_file": source.gguf} if source.gguf else files


@dataclass(frozen=True, slots=True)
class _LoadedForm:
    """What a network is to be once it is loaded."""

    dtype: torch.dtype
    attention: str
    rounding: Quantization


def _placed_network(
    source: HfSource, config: Any, device: torch.device, form: _LoadedForm, placing: Placing
) -> tuple[Any, LayerStream | None]:
    """Straight to the device if everything is sure to fit there, else by way of RAM, at once or layer by layer."""
    awq = None if source.gguf else awq_format(config)
    checkpoint = None if source.gguf else Checkpoint(source.folder, awq)
    size = checkpoint.size(form.dtype) if checkpoint else 0
    if form.rounding is not Quantization.NONE:
        return _rounded_network(source, config, device, form, placing, checkpoint)
    if shares_ram(device):
        placing = placing.in_unified_memory(size)
    fits = size <= weights_budget(device, placing.gpu_memory)
    if awq is None and fits and not placing.lets_weights_pass:
        return _network(source, config, device, form), None
    if checkpoint is None or (awq is None and size <= (placing.ram or 0) + placing.promised_ram):
        # transformers knows weights by former names, too, and puts together what files have apart.
        network = _network(source, config, torch.device("cpu"), form)
        return network, place_layers(network, device, placing)
    network = checkpoint.build(config, form.dtype, form.attention)
    return network, place_layers(network, device, placing, checkpoint)


def _rounded_network(
    source: HfSource,
    config: Any,
    device: torch.device,
    form: _LoadedForm,
    placing: Placing,
    checkpoint: Checkpoint | None,
) -> tuple[Any, LayerStream | None]:
    """Layer by layer, so that it is never there in full; through RAM where files have other names for weights."""
    if getattr(config, "quantization_config", None) is not None:
        raise EngineError(f"The weights of {source.name} are in few bits already: leave --quantization out.")
    network, weights = None, checkpoint
    if checkpoint is not None:
        try:
            network = checkpoint.build(config, form.dtype, form.attention, form.rounding)
        except ModelBroken:
            if checkpoint.size(form.dtype) > (placing.ram or 0) + placing.promised_ram:
                raise
    if network is None:
        network, weights = _network(source, config, torch.device("cpu"), form), None
        round_layers(network, form.rounding)
    if shares_ram(device):
        placing = placing.in_unified_memory(weights_bytes(network))
    return network, place_layers(network, device, placing, weights)


def _network(source: HfSource, config: Any, device: torch.device, form: _LoadedForm) -> Any:
    def load(attention: str) -> Any:
        return load_network(
            AutoModelForCausalLM, source, config, device, dtype=form.dtype, attn_implementation=attention
        )

    try:
        return load(form.attention)
    except KeyError as unknown:
        if unknown.args != (form.attention,):
            raise
        return load("eager")  # a model that knows only its own ways to compute attention


def load_network(
    kind: Any, source: HfSource, config: Any, device: torch.device, ignored: tuple[str, ...] = (), **more: Any
) -> Any:
    """A network for inference, by an auto class of transformers. `ignored`: what names of weights begin with that
    may be missing. Raises ModelBroken where others are: transformers would go on with random numbers."""
    network, report = kind.from_pretrained(
        source.folder,
        config=config,
        # Straight to where they are used: the weights are never in RAM as a whole.
        device_map=None if device.type == "cpu" else {"": device},
        use_safetensors=True,
        output_loading_info=True,
        **local_files(source),
        **more,
    )
    if missing := [name for name in report["missing_keys"] if not name.startswith(ignored)]:
        raise ModelBroken(f"{source.name} lacks weights ({min(missing)}): pull a complete model.")
    return network.eval().requires_grad_(False)


def own_dtype(source: HfSource, config: Any) -> torch.dtype:
    if source.gguf:
        return torch.bfloat16
    own = config.dtype or config.get_text_config(decoder=True).dtype
    return own if isinstance(own, torch.dtype) else torch.bfloat16


def load_tokenizer(source: HfSource) -> PreTrainedTokenizerFast:
    if source.gguf:
        # Not by AutoTokenizer, which reads the whole file again for a config that it does not need.
        return PreTrainedTokenizerFast.from_pretrained(source.folder, **local_files(source))
    tokenizer = AutoTokenizer.from_pretrained(source.folder, **local_files(source))
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelBroken(f"{source.name} has no tokenizer.json: choose a model with a fast tokenizer.")
    return tokenizer


def _vocab(source: HfSource, tokenizer: PreTrainedTokenizerFast, network: Any) -> HfVocab:
    backend = tokenizer.backend_tokenizer
    if source.gguf:
        repair_gguf_tokenizer(backend, source.facts)
    return HfVocab(
        backend,
        network.get_output_embeddings().weight.shape[0],
        bos=tokenizer.bos_token_id,
        eos=tokenizer.eos_token_id,
        ends=[*_ends(network), *gguf_ends(source.facts)],
        adds_bos=gguf_adds_bos(source.facts) if source.gguf else None,
    )


def _ends(network: Any) -> list[int]:
    named = network.generation_config.eos_token_id if network.generation_config else None
    if named is None:
        named = network.config.get_text_config(decoder=True).eos_token_id
    return named if isinstance(named, list) else [] if named is None else [named]


def _template(tokenizer: PreTrainedTokenizerFast) -> str | None:
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _context_length(config: Any) -> int:
    """The longest in which no frequency of RoPE depends on how long the context is: state that was computed in a
    shorter one would be wrong in a longer one."""
    trained = int(getattr(config, "max_position_embeddings", None) or _CONTEXT_IF_UNKNOWN)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, Mapping)]
    changing = [each for each in kinds if each.get("rope_type") in ("dynamic", "longrope")]
    fixed = min(
        [int(each.get("original_max_position_embeddings") or trained) for each in changing], default=trained
    )
    if fixed < trained:
        log.warning("the context is limited to %d tokens: beyond them this model's positions change", fixed)
    return min(trained, fixed)


@contextmanager
def translate_errors(source: HfSource, device: torch.device) -> Iterator[None]:
    try:
        yield
    except EmberkeepError:
        raise
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"{source.name} does not fit into the memory of {device}: choose a smaller model or --device cpu."
        ) from error
    except Exception as error:
        # Anything: each architecture, tokenizer and file format has its own ways to fail.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise ModelBroken(f"transformers cannot load {source.name}: {reason}.") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without bars and advice on stderr."""
    level, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if has_bars:
            transformers_logging.enable_progress_bar()


_PAYLOADS, _RECORDED, _ON_CPU, _INT4, _ROUNDED = 1, 4, 1, 1, 1
"""Versions, raised when the bytes change that something gives: payloads; the kernels that steps are recorded with;
attention, panels and layers of ours on a CPU; kernels for weights in four bits; the rounding of weights when they
are loaded."""


def fingerprint(
    model: HfModel,
    layout: Json,
    weights_digest: str,
    attention: str,
    *,
    layers: str | None = None,
    stored: Stored | None = None,
) -> bytes:
    """`attention`: which code computes it. `layers`: which code of ours computes them; None: the model's own
    does. The number of threads is left out: they round as the shapes of steps do."""
    config = model.network.config.get_text_config()
    has_int4 = model.network.device.type == "cuda" and int4_count(model.network) > 0
    fields = {
        "engine": "hf",
        "version": _PAYLOADS,
        "torch": [torch.__version__, torch.__config__.show()],
        "transformers": transformers.__version__,
        "weights": weights_digest,
        "architecture": type(model.network).__name__,
        "dtype": str(model.network.dtype),
        "layout": layout,
        "rope": getattr(config, "rope_parameters", None),
        "device": _device(model.network.device),
        "switches": _switches(),
        "attention": attention,
        "recorded": [_RECORDED, layers] if layers else False,
    }
    if model.network.device.type == "cpu":
        fields["on a CPU"] = [_ON_CPU, has_panels(model.network)]
    if model.quantization is not Quantization.NONE:
        fields["quantization"] = [model.quantization, _ROUNDED]
    if has_int4:
        fields["int4"] = _INT4

    def with_threads(threads: int) -> bytes:
        return _digest({**fields, "device": [*fields["device"], threads]})

    # On a GPU the number of threads was never a part of it.
    return known_as(_digest(fields), with_threads, stored if model.network.device.type == "cpu" else None)


def _digest(fields: Mapping[str, Json]) -> bytes:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).digest()


def _device(device: torch.device) -> Json:
    """Libraries choose their kernels by what they run on."""
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        return ["cuda", name, capability, torch.version.cuda, torch.backends.cudnn.version()]
    if device.type == "mps":
        return ["mps", platform.machine(), platform.mac_ver()[0]]
    return [device.type, *cpu_facts(), torch.backends.cpu.get_cpu_capability()]


def _switches() -> Json:
    """What is set for the whole process: it may have been changed before the model was opened."""
    cuda = torch.backends.cuda
    return {
        "float32": torch.get_float32_matmul_precision(),
        "tf32": [cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "short sums": [
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
        ],
        "attention": [
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ],
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
