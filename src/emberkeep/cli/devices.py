"""`emberkeep devices`: what can compute here, as each engine sees it, and what a model would be put on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from emberkeep.cli.commands import JsonFlag, one_command, with_settings
from emberkeep.cli.console import show_table
from emberkeep.config.kinds import readable_size
from emberkeep.config.machine import free_ram, total_ram
from emberkeep.config.settings import Config
from emberkeep.engine.devices import Cpu, Device, amd_advice, has_hf, read_cpu
from emberkeep.errors import EngineError
from emberkeep.types.request import Json
from emberkeep.values import dataclass

CPU = "cpu"
Uses = Mapping[str, Sequence[str]]
"""By kind of model, the names of the devices that it would be put on."""
_REINSTALL_HF = "pip install --force-reinstall 'emberkeep[hf]'"


@dataclass(frozen=True, slots=True)
class EngineView:
    """What one engine sees."""

    engine: str
    devices: Sequence[Device] = ()
    used: tuple[str, ...] = ()
    """The names of those that a model would be put on with these settings; none where no model can be run."""
    problem: str | None = None
    """Why it cannot be asked, in a sentence with the way out."""
    is_missing: bool = False
    """It is not installed, which is no fault."""


@with_settings("data_dir", "engine", "device", "gpu_layers", "config", "as_json")
def devices(config: Config, as_json: JsonFlag = False) -> None:
    """What can compute on this machine: its CPU and its GPUs, as llama.cpp and PyTorch see them.

    No model is loaded, and nothing is fetched.
    """
    cpu, views = read_cpu(), (llamacpp_view(config), torch_view(config))
    uses = _uses(config, *views)
    notes = [note for note in (*(view.problem for view in views), amd_advice(os.environ)) if note]
    if as_json:
        print(json.dumps(_json(cpu, views, uses, notes), indent=2))
        return
    show_table(("device", "engine", "what it is", "free", "memory", "runs"), _rows(cpu, views, uses))
    for note in notes:
        print(note)


def llamacpp_view(config: Config) -> EngineView:
    """Loads its library, which is tried first in a process of its own. Blocks for a second the first time."""
    from emberkeep.engine.llamacpp.gpus import gpus, seen_devices
    from emberkeep.engine.llamacpp.shared_library import is_missing
    from emberkeep.engine.llamacpp.trial import choose_library

    if is_missing(config.llama_library):
        return EngineView(
            "llamacpp", problem="llama.cpp is not here yet: `emberkeep serve` fetches it.", is_missing=True
        )

    try:
        choose_library(config.llama_library)
    except EngineError as error:
        return EngineView("llamacpp", problem=str(error))
    found = [gpu.name for gpu in gpus()] if config.gpu_layers != 0 else []
    return EngineView("llamacpp", seen_devices(), tuple(found) or (CPU,))


def torch_view(config: Config) -> EngineView:
    """Imports torch, where it is installed. Blocks for seconds the first time."""
    if not has_hf():
        missing = "The Hugging Face engine is not installed: `pip install 'emberkeep[hf]'` adds it."
        return EngineView("hf", problem=missing, is_missing=True)

    try:
        from emberkeep.engine.hf.device import choose_device, seen_devices

        return EngineView("hf", seen_devices(), (str(choose_device(config.device)),))
    except EngineError as error:
        return EngineView("hf", problem=str(error))
    except (ImportError, OSError, RuntimeError) as error:
        return EngineView("hf", problem=f"torch cannot be loaded ({error}): run `{_REINSTALL_HF}`.")


def _uses(config: Config, llamacpp: EngineView, torch: EngineView) -> dict[str, tuple[str, ...]]:
    """What a model of each kind would be put on; nothing where the settings leave no engine for it."""
    return {
        "GGUF": torch.used if config.engine == "hf" else llamacpp.used,
        "Hugging Face": () if config.engine == "llamacpp" else torch.used,
    }


def describe(device: Device) -> str:
    free = "" if device.free is None else f", {readable_size(device.free)} free"
    return f"{device.name} ({device.description}){free}"


def describe_cpu(cpu: Cpu) -> str:
    cores = f"{cpu.cores} core{'' if cpu.cores == 1 else 's'}"
    return f"{cpu.name}, {cores}" + (f": {' '.join(cpu.features)}" if cpu.features else "")


def _rows(cpu: Cpu, views: Sequence[EngineView], uses: Uses) -> Iterator[Sequence[str]]:
    engines = ", ".join(view.engine for view in views if view.used)
    yield CPU, engines, describe_cpu(cpu), _size(free_ram()), _size(total_ram()), _kinds_on(CPU, uses)
    for view in views:
        for each in view.devices:
            what = f"{each.description} ({each.backend})"
            yield each.name, view.engine, what, _size(each.free), _size(each.total), _kinds_on(each.name, uses)


def _kinds_on(name: str, uses: Uses) -> str:
    return ", ".join(kind for kind, used in uses.items() if name in used)


def _size(count: int | None) -> str:
    return "" if count is None else readable_size(count)


def _json(cpu: Cpu, views: Sequence[EngineView], uses: Uses, notes: Sequence[str]) -> dict[str, Json]:
    return {
        "cpu": {**asdict(cpu), "free": free_ram(), "total": total_ram()},
        "devices": [{"engine": view.engine, **asdict(each)} for view in views for each in view.devices],
        "used_for": {kind: list(used) for kind, used in zip(("gguf", "hf"), uses.values(), strict=True)},
        "notes": list(notes),
    }


app = one_command(devices)
